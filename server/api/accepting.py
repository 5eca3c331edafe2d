"""How calls get from gRPC into the event loop: a patch of grpc.aio's server.

Knows: the private parts of grpc.aio 1.85 that accept calls. Does not know: keys, what calls do.

What is patched, and why:
- grpc.aio's poller thread sends the event loop one byte for each event, and the loop reads one byte
  a turn. Where events come faster than turns, the socket between them fills up (after 278 events),
  the poller blocks, and each turn handles one event. With 600 streams and little CPU time, calls
  were seconds old before Python saw them. Here a turn reads all bytes.
- grpc.aio accepts one call of each method in several turns of the event loop, first in, first out.
  Here many are accepted at once. Those that the engine's queue has no place for are rejected at
  once: a rejection costs no more than a header, and waits for no other call. The others have a
  place and wait in an AcceptQueue; a few are started in a turn, so that what was started ends
  before its deadline. Those that waited too long are rejected unread.
- grpc.aio decodes the name of an unregistered method as UTF-8 inside the loop that accepts all
  calls. A path with the byte 0xff ends that loop, and with it the server and everybody's calls;
  whoever can connect can do that, with or without a key. A generic handler, the public way to
  handle unknown methods, is asked only after that decoding. All our methods are registered, so
  calls of others are accepted here instead: their names aren't decoded, and they end with
  UNIMPLEMENTED.

When it can go: when tests/server/api/test_accepting.py passes with a plain `grpc.aio.server()`, and
the path that tests/server/end_to_end/test_fuzz.py sends gets UNIMPLEMENTED from it. The same tests
fail where another grpcio needs another patch.
"""

import asyncio
import contextlib
import functools
import importlib
import logging
import os
import types
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import grpc

from quill.server.api.accept_queue import AcceptQueue

_aio_server: Any = importlib.import_module("grpc.aio._server")
_core: Any = importlib.import_module("grpc._cython.cygrpc")

logger = logging.getLogger(__name__)
HEALTH = "/grpc.health."  # answered first: it is how others learn that a server is overloaded
UNKNOWN_METHOD = "/unknown/unknown"  # instead of the name
NUM_ACCEPTORS = 64  # of each method: calls that are accepted in one turn of the event loop
MAX_STARTS = 16  # in one turn: a call that was started should end before its deadline
MAX_WAKEUPS = 4096  # bytes: more than the socket holds
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Interceptor(Protocol):
    """Decides on calls by their headers. `context` is grpc.aio's."""

    def reserve(self, method: str, context: Any) -> "tuple[Handler | None, str | None]":
        """What rejects the call, if anything does, and the call's place in the engine's queue."""

    def reject_late(self, method: str, context: Any) -> "Handler | None":
        """What rejects a call that waited too long. None: nobody waits for a status."""

    def free(self, place: str | None) -> None:
        """The call is rejected, or started: its message gets a place of its own."""


class _Accepted(NamedTuple):
    """A call that waits until it is started."""

    name: str
    state: Any  # grpc.aio's
    place: str | None


class _Core(_core.AioServer):  # type: ignore[misc]
    """Accepts calls. `_make_request_call_future` is how grpc.aio waits for each method's next."""

    def __init__(
        self,
        loop: Any,
        interceptor: Interceptor,
        options: Any,
    ) -> None:
        super().__init__(loop, None, (), (), options, None)
        self._own_loop = loop
        self._interceptor = interceptor
        self._handlers: dict[str, Any] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._accepted: AcceptQueue[_Accepted] = AcceptQueue()

    def add_registered_method_handlers(self, handlers: dict[str, Any]) -> None:
        super().add_registered_method_handlers(handlers)
        self._handlers.update(handlers)

    def _make_request_call_future(self, method: bytes | None) -> Any:
        """Of a task that accepts all calls, and ends as grpc.aio expects when the server stops."""
        acceptors = [self._accept(method) for _ in range(1 if method is None else NUM_ACCEPTORS)]
        return asyncio.gather(*acceptors)

    async def _accept(self, method: bytes | None) -> None:
        """Until the server stops: then requesting a call raises."""
        name = UNKNOWN_METHOD if method is None else method.decode()
        while True:
            if method is None:
                state = await self._request_call()
            else:
                state = await self._request_registered_call(method)
            if name.startswith(HEALTH):
                self._start(_Accepted(name, state, None))
            else:
                self._reject_or_queue(name, state)
            del state  # it would stay until this acceptor's next call

    def _reject_or_queue(self, name: str, state: Any) -> None:
        context, handler, place = self._context(state), None, None
        left_s = context.time_remaining()
        if left_s is None or left_s > 0:
            handler, place = self._interceptor.reserve(name, context)
        if handler is not None:
            self._reject(name, state, handler)
            return
        if not self._accepted:
            self._own_loop.call_soon(self._start_some)
        self._accepted.put(_Accepted(name, state, place), left_s)

    def _start_some(self) -> None:
        """Once a turn, while calls wait, also if one of them meets a bug."""
        try:
            self._reject_late()
            for _ in range(min(MAX_STARTS, len(self._accepted))):
                self._start(self._accepted.take_newest())
        finally:
            if self._accepted:
                self._own_loop.call_soon(self._start_some)

    def _reject_late(self) -> None:
        for name, state, place in self._accepted.take_late():
            self._interceptor.free(place)
            handler = self._interceptor.reject_late(name, self._context(state))
            if handler is not None:
                self._reject(name, state, handler)

    def _context(self, state: Any) -> Any:
        return _core._ServicerContext(state, None, None, self._own_loop)

    def _reject(self, name: str, state: Any, handler: Any) -> None:
        """Sends the status in this turn of the event loop: a task would begin in the next one."""
        answer = self._answer(name, state, {name: handler}, ())
        with contextlib.suppress(StopIteration, _core.ExecuteBatchError):
            self._keep(_rest(answer, answer.send(None)))

    def _start(self, call: _Accepted) -> None:
        handlers = {} if call.name == UNKNOWN_METHOD else self._handlers
        # Now the server waits for the call's message, which may never come.
        self._interceptor.free(call.place)
        answer = self._answer(call.name, call.state, handlers, (self._interceptor,))
        self._keep(_core._schedule_rpc_coro(answer, call.state, self._own_loop, call.name))

    def _answer(
        self, name: str, state: Any, handlers: dict[str, Any], interceptors: Sequence[Any]
    ) -> Any:
        resolver = _core._MethodResolver([], handlers)
        return _core._handle_rpc(name, resolver, interceptors, state, self._own_loop, False)

    def _keep(self, answer: Any) -> None:
        task: asyncio.Task[None] = self._own_loop.create_task(answer)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)


@types.coroutine
def _rest(coroutine: Any, future: Any) -> Generator[Any, None, None]:
    """Of a coroutine that waits for a future. A client that has left can't be sent a status."""
    with contextlib.suppress(_core.ExecuteBatchError):
        yield future
        yield from coroutine.__await__()


class AcceptingServer(_aio_server.Server):  # type: ignore[misc]
    """As grpc.aio.server() makes one, with a `_Core`."""

    def __init__(
        self,
        interceptor: Interceptor,
        options: Sequence[tuple[str, Any]],
    ) -> None:
        self._loop = _core.get_working_loop()
        arguments = _aio_server._augment_channel_arguments(options, None)
        self._server = _Core(self._loop, interceptor, arguments)
        _read_all_wakeups(self._loop)


def _read_all_wakeups(loop: Any) -> None:
    """The poller queues an event before it writes the event's byte, so no event is missed."""
    selector = getattr(loop, "_selector", None)  # uvloop, which Ray brings, has none
    for key in [] if selector is None else list(selector.get_map().values()):
        handle = key.data[0]
        if handle is None or not isinstance(handle._callback, functools.partial):
            continue
        if getattr(handle._callback.func, "__name__", "") == "_handle_events":
            loop.add_reader(key.fd, _handle_all, key.fd, handle._callback)


def _handle_all(fd: int, handle_events: Callable[[], None]) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(fd, MAX_WAKEUPS)
    is_done = False
    while not is_done:
        try:
            handle_events()
            is_done = True
        except RuntimeError:  # an event of another loop, which is closed: it is off the queue now
            logger.debug("an event of gRPC's is dropped", exc_info=True)
