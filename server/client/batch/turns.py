"""Which of several servers is asked next, and when one is asked again.

Knows: errors, waiting. Does not know: what is asked, and how.

A call goes to the server with the fewest of ours. One that is away or full rests, and the call goes
elsewhere: the same seed gives the same answer there. While any of them answers nobody gives up.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc

from quill.server.client.errors import CallError
from quill.server.client.retry import is_retryable
from quill.server.errors import ServerError

logger = logging.getLogger(__name__)

PATIENCE_S = 300.0
_FIRST_REST_S, _MAX_REST_S = 0.2, 10.0
_MAX_BUGS = 2
# What says nothing of one line: the next one would hear the same.
_FOR_ALL = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)

_Client = TypeVar("_Client")
_Answer = TypeVar("_Answer")


class StoppedError(ServerError):
    """Nothing more can be asked for now. What is answered is kept."""


@dataclass
class _Server(Generic[_Client]):
    address: str
    client: _Client
    num_calls: int = 0
    num_failures: int = 0  # since it last answered
    rests_until_s: float = 0.0


class Turns(Generic[_Client]):
    """Belongs to one event loop."""

    def __init__(self, clients: Mapping[str, _Client], patience_s: float = PATIENCE_S) -> None:
        self._servers = [_Server(address, client) for address, client in clients.items()]
        self._patience_s = patience_s
        self._heard_s = time.monotonic()  # when any of them said anything

    async def ask(self, send: Callable[[_Client], Awaitable[_Answer]]) -> _Answer:
        """Errors are CallErrors about this request alone, or one StoppedError."""
        num_bugs = 0
        while True:
            server = await self._free_server()
            server.num_calls += 1
            try:
                answer = await send(server.client)
            except CallError as error:
                # A step that failed may have been another request's fault.
                is_bug = error.code is grpc.StatusCode.INTERNAL and not error.is_broken
                num_bugs += is_bug
                if not is_bug or num_bugs > _MAX_BUGS:
                    self._note(server, error)
            else:
                server.num_failures = 0
                self._heard_s = time.monotonic()
                return answer
            finally:
                server.num_calls -= 1

    async def _free_server(self) -> _Server[_Client]:
        while True:
            now_s = time.monotonic()
            awake = [each for each in self._servers if each.rests_until_s <= now_s]
            if awake:
                return min(awake, key=lambda each: each.num_calls)
            await asyncio.sleep(min(each.rests_until_s for each in self._servers) - now_s)

    def _note(self, server: _Server[_Client], error: CallError) -> None:
        """The server rests, if the error passes. Others are raised."""
        now_s = time.monotonic()
        passes = is_retryable(error)
        away = passes and error.retry_after_s is None
        if not away:
            self._heard_s = now_s
        if not passes:
            if error.code in _FOR_ALL or error.is_lasting:
                raise StoppedError(f"{server.address}: {error}") from error
            raise error
        if now_s - self._heard_s > self._patience_s:
            raise StoppedError(
                f"no server has answered for {self._patience_s:g} s; the last said: {error}"
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
