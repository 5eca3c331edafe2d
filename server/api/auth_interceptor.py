"""Lets in only calls with a good API key, before anything of them is read.

Knows: grpc.aio's interceptors, which services are open. Does not know: what calls do, keys' limits.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc

from quill.protos import generation_pb2 as pb
from quill.protos import kserve_pb2 as kserve
from quill.server.api.answering import frontend_of
from quill.server.api.status import grpc_status
from quill.server.auth.caller import CALLER
from quill.server.auth.key_file import Keyring
from quill.server.errors import RequestError
from quill.server.service.calls import Calls
from quill.server.service.origin import Origin

HEALTH = "/grpc.health."
REFLECTION = "/grpc.reflection."
_METHODS = {
    f"/{service.full_name}/{method.name}": method.name
    for file in (pb.DESCRIPTOR, kserve.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
}


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Health is open to all: whoever restarts or balances servers has no key.

    `also_open`: how other methods begin that are.
    """

    def __init__(
        self, keyring: Keyring, open_reflection: bool, calls: Calls, also_open: Sequence[str] = ()
    ) -> None:
        self._keyring = keyring
        self._open = (HEALTH, *([REFLECTION] if open_reflection else []), *also_open)
        self._calls = calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = str(handler_call_details.method)
        if method.startswith(self._open):
            return await continuation(handler_call_details)
        headers = [
            str(value)
            for name, value in handler_call_details.invocation_metadata
            if name == "authorization"
        ]
        try:
            caller = self._keyring.identify(headers)
        except RequestError as error:
            return self._refuse(method, error)
        CALLER.set(caller)
        return await continuation(handler_call_details)

    def _refuse(self, method: str, error: RequestError) -> Any:
        """As a stream, whatever the method is: so no message is waited for."""
        # A name that the caller made up must not become a label of the metrics.
        origin = Origin(method=_METHODS.get(method, "other"), frontend=frontend_of(method))

        async def answer(requests: AsyncIterator[bytes], context: Any) -> None:
            self._calls.refuse(origin, error)
            await context.abort_with_status(grpc_status(error, origin.request_id))

        return grpc.stream_stream_rpc_method_handler(answer)
