"""Answers the calls of those who run the server. Where callers have no API keys, in words only.

Knows: grpc.aio, who may do what. Does not know: how a bundle is loaded.
"""

import asyncio
from collections.abc import Awaitable, Callable

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.api.answering import Context, answering
from quill.server.errors import ForbiddenError, UnimplementedError
from quill.server.protocol.responses import model_message
from quill.server.protocol.served_model import ServedModel
from quill.server.service.calls import Calls


class Administration(pb_grpc.AdministrationServicer):
    def __init__(self, calls: Calls, reload: Callable[[], Awaitable[ServedModel]] | None) -> None:
        """Without `reload` nobody can be told from anybody else, so nobody may."""
        self._calls = calls
        self._reload = reload

    async def Reload(self, request: pb.ReloadRequest, context: Context) -> pb.ReloadResponse:
        async with answering("Reload", context) as origin, self._calls.call(origin):
            if self._reload is None:
                raise UnimplementedError(
                    "this server was started without --api-keys, so it knows no administrator. "
                    "Send its process SIGHUP to reload, or start it with --api-keys FILE and call "
                    "with a key that `quill keys add FILE NAME --admin` made"
                )
            caller = origin.caller
            if not caller.admin:
                raise ForbiddenError(
                    f"the API key {caller.name} may not reload. `quill keys add --admin` makes one "
                    "that may"
                )
            # Once begun it goes on, even if whoever asked for it leaves.
            served = await asyncio.shield(asyncio.ensure_future(self._reload()))
            return pb.ReloadResponse(model=model_message(served))
