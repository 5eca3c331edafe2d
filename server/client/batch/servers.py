"""Any number of servers that serve the same model, and answers from whichever has time.

Knows: clients, waiting. Does not know: files, order.

A call goes to the server with the fewest of ours. One that is away or full rests, and the call goes
elsewhere: the same seed gives the same answer there. While any of them answers nobody gives up.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from quill.protos import generation_pb2 as pb
from quill.server.client.access import Access
from quill.server.client.async_client import AsyncClient
from quill.server.client.batch.answer import Response
from quill.server.client.batch.line import Request
from quill.server.client.call_error import CallError
from quill.server.client.retry import Retries
from quill.server.errors import ServerError

logger = logging.getLogger(__name__)

PATIENCE_S = 300.0
_ONCE = Retries(max_retries=0)
_FIRST_REST_S, _MAX_REST_S = 0.2, 10.0
_MAX_BROKEN = 2
_LOOK_S = 10.0  # for whether a server is there at all
# What says nothing of one line: the next one would hear the same.
_FOR_ALL = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


class StoppedError(ServerError):
    """Nothing more can be asked for now. What is answered is kept."""


@dataclass
class _Server:
    address: str
    client: AsyncClient
    num_calls: int = 0
    num_failures: int = 0  # since it last answered
    rests_until_s: float = 0.0


@dataclass
class Servers:
    """Belongs to one event loop."""

    addresses: Sequence[str]
    access: Access | None = None
    patience_s: float = PATIENCE_S
    timeout_s: float | None = None  # of one call
    _servers: list[_Server] = field(init=False)
    _heard_s: float = field(init=False)  # when any of them said anything

    def __post_init__(self) -> None:
        self._servers = [
            _Server(each, AsyncClient(each, _ONCE, access=self.access)) for each in self.addresses
        ]
        self._heard_s = time.monotonic()

    async def __aenter__(self) -> "Servers":
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            await server.client.close()

    async def model(self) -> str:
        """What all of them serve. Answers of two models in one file would be neither's."""
        told = await asyncio.gather(*map(self._ask_model, self._servers), return_exceptions=True)
        found = {
            server.address: f"{each.name} ({each.precision})"
            for server, each in zip(self._servers, told, strict=True)
            if isinstance(each, pb.Model)
        }
        if not found:
            error = told[0]
            assert isinstance(error, BaseException)
            raise error
        if len(set(found.values())) > 1:
            shown = ", ".join(f"{address} {model}" for address, model in found.items())
            raise StoppedError(f"the servers serve different models: {shown}. Name equal ones")
        return next(iter(found.values()))

    async def _ask_model(self, server: _Server) -> pb.Model:
        try:
            return await server.client.model(timeout_s=_LOOK_S)
        except CallError as error:
            logger.warning("%s: %s", server.address, error)
            server.rests_until_s = time.monotonic() + _FIRST_REST_S
            raise

    async def ask(self, request: Request) -> Response:
        """Errors are CallErrors about this request alone, or one StoppedError."""
        num_broken = 0
        while True:
            server = await self._free_server()
            server.num_calls += 1
            try:
                response = await self._send(server.client, request)
            except CallError as error:
                # A step that failed may have been another request's fault.
                num_broken += error.code is grpc.StatusCode.INTERNAL
                if error.code is not grpc.StatusCode.INTERNAL or num_broken > _MAX_BROKEN:
                    self._note(server, error)
            else:
                server.num_failures = 0
                self._heard_s = time.monotonic()
                return response
            finally:
                server.num_calls -= 1

    async def _send(self, client: AsyncClient, request: Request) -> Response:
        if isinstance(request, pb.GenerateRequest):
            return await client.generate(request, timeout_s=self.timeout_s)
        return await client.embed(request, timeout_s=self.timeout_s)

    async def _free_server(self) -> _Server:
        while True:
            now_s = time.monotonic()
            awake = [each for each in self._servers if each.rests_until_s <= now_s]
            if awake:
                return min(awake, key=lambda each: each.num_calls)
            await asyncio.sleep(min(each.rests_until_s for each in self._servers) - now_s)

    def _note(self, server: _Server, error: CallError) -> None:
        """The server rests, if the error passes. Others are raised."""
        now_s = time.monotonic()
        away = error.code is grpc.StatusCode.UNAVAILABLE and not error.is_lasting
        full = error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.retry_after_s is not None
        if not away:
            self._heard_s = now_s
        if not away and not full:
            if error.code in _FOR_ALL or error.is_lasting:
                raise StoppedError(f"{server.address}: {error}") from error
            raise error
        if now_s - self._heard_s > self.patience_s:
            raise StoppedError(
                f"no server has answered for {self.patience_s:g} s; the last said: {error}"
            ) from error
        if server.rests_until_s > now_s:
            return  # another call has said so already
        rest_s = error.retry_after_s
        if rest_s is None:
            rest_s = min(_FIRST_REST_S * 2**server.num_failures, _MAX_REST_S)
        if away and not server.num_failures:
            logger.warning("%s is away: %s", server.address, error.reason)
        server.num_failures += away
        server.rests_until_s = now_s + rest_s
