"""Any number of servers that serve the same model, over gRPC and over HTTP.

Knows: clients of both. Does not know: files, order, whose turn it is.
"""

import asyncio
import itertools
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc

from quill.protos import generation_pb2 as pb
from quill.server.client.access import Access
from quill.server.client.async_client import AsyncClient
from quill.server.client.batch.answer import Response
from quill.server.client.batch.calls import embed, generate
from quill.server.client.batch.line import Request
from quill.server.client.batch.posting import Posted, Poster, Reply
from quill.server.client.batch.turns import PATIENCE_S, StoppedError, Turns
from quill.server.client.errors import CallError
from quill.server.client.retry import Retries
from quill.server.client.target import is_multiple, read_target

logger = logging.getLogger(__name__)

CONCURRENCY = 32
HTTP_BESIDE = 2  # the HTTP port's distance from gRPC's, if nobody chose otherwise
_ONCE = Retries(max_retries=0)  # whether to ask again is decided here
_LOOK_S = 10.0  # for whether a server is there at all


@dataclass(frozen=True, kw_only=True)
class Asking:
    """Which servers, and how they are asked."""

    addresses: Sequence[str]
    http_addresses: Sequence[str] = ()  # none: beside gRPC's
    access: Access = field(default_factory=Access)
    concurrency: int = CONCURRENCY
    patience_s: float = PATIENCE_S
    timeout_s: float | None = None  # of one call


class Servers:
    """Belongs to one event loop."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        access, patience_s = asking.access, asking.patience_s
        servers = _single(asking.addresses)
        self._clients = {each: AsyncClient(each, _ONCE, access=access) for each in servers}
        self._turns = Turns(self._clients, patience_s)
        http = asking.http_addresses or [_beside(each) for each in servers if not is_multiple(each)]
        self._posters = {each: Poster(each, access) for each in http}
        self._posting = Turns(self._posters, patience_s)
        self._threads = ThreadPoolExecutor(asking.concurrency)

    async def __aenter__(self) -> "Servers":
        return self

    async def __aexit__(self, *_: object) -> None:
        for poster in self._posters.values():
            poster.hang_up()
        self._threads.shutdown(cancel_futures=True)
        for poster in self._posters.values():
            poster.close()
        for client in self._clients.values():
            await client.close()

    async def model(self) -> str:
        """What all of them serve. Answers of two models in one file would be neither's."""
        told = await asyncio.gather(*(self._ask_model(each) for each in self._clients))
        found = {address: model for address, model in told if isinstance(model, str)}
        if not found:
            error = told[0][1]
            assert isinstance(error, CallError)
            raise error
        if len(set(found.values())) > 1:
            shown = ", ".join(f"{address} {model}" for address, model in found.items())
            raise StoppedError(f"the servers serve different models: {shown}. Name equal ones")
        return next(iter(found.values()))

    async def _ask_model(self, address: str) -> tuple[str, str | CallError]:
        try:
            model = await self._clients[address].model(timeout_s=_LOOK_S)
        except CallError as error:
            logger.warning("%s: %s", address, error)
            return address, error
        return address, f"{model.name} ({model.precision})"

    async def ask(self, request: Request) -> Response:
        """Errors are CallErrors about this request alone, or one StoppedError."""
        timeout_s = self._asking.timeout_s

        async def send(client: AsyncClient) -> Response:
            if isinstance(request, pb.GenerateRequest):
                return _whole(await generate(client, request, timeout_s))
            return await embed(client, request, timeout_s)

        return await self._turns.ask(send)

    async def post(self, posted: Posted) -> Reply:
        """The same, in OpenAI's words."""
        if not self._posters:
            raise StoppedError("OpenAI's lines go to the servers' HTTP ports: say them with --http")
        loop, timeout_s = asyncio.get_running_loop(), self._asking.timeout_s

        async def send(poster: Poster) -> Reply:
            return await loop.run_in_executor(self._threads, poster.post, posted, timeout_s)

        return await self._posting.ask(send)


def _whole(response: pb.GenerateResponse) -> pb.GenerateResponse:
    """An answer that the clock has cut would be another one the next time."""
    if any(each.finish_reason == pb.FINISH_REASON_DEADLINE for each in response.sequences):
        reason = "the answer wasn't complete in time"
        raise CallError(grpc.StatusCode.DEADLINE_EXCEEDED, reason)
    return response


def _single(addresses: Sequence[str]) -> list[str]:
    """Each server by itself, so that a full one rests and the others don't. Who is behind a name
    changes, and is known to that client alone."""
    targets = [(each, read_target(each)) for each in addresses]
    lists = [[each] if target.name else list(target.servers) for each, target in targets]
    return list(dict.fromkeys(itertools.chain(*lists)))


def _beside(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + HTTP_BESIDE}"
