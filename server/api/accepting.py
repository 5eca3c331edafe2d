"""How calls get from gRPC into the event loop: a patch of grpc.aio's server.

Knows: the private parts of grpc.aio 1.85 that accept calls. Does not know: keys, what calls do.

What is patched, and why:
- grpc.aio's poller thread sends the event loop one byte for each event, and the loop reads one byte
  a turn. Where events come faster than turns, the socket between them fills up (after 278 events),
  the poller blocks, and each turn handles one event. With 600 streams and little CPU time, calls
  were seconds old before Python saw them. Here a turn reads all bytes.
- grpc.aio accepts one call of each method in several turns of the event loop, first in, first out.
  Here many are accepted at once and wait in an AcceptQueue; a few are started in a turn, so that
  what was started ends before its deadline. Those that there is no place for, or that waited too
  long, are rejected at once. A rejection costs no more than a header: no message is read.
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
import os
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from quill.server.api.accept_queue import AcceptQueue

_aio_server: Any = importlib.import_module("grpc.aio._server")
_core: Any = importlib.import_module("grpc._cython.cygrpc")

HEALTH = "/grpc.health."  # answered first: it is how others learn that a server is overloaded
UNKNOWN_METHOD = "/unknown/unknown"  # instead of the name
NUM_ACCEPTORS = 64  # of each method: calls that are accepted in one turn of the event loop
MAX_STARTS = 16  # in one turn: a call that was started should end before its deadline
MAX_TAKEN = 64  # in one turn, with those that are rejected: a rejection took 0.13 ms
MAX_WAKEUPS = 4096  # bytes: more than the socket holds
# Of a method's name and the call's context: the handler that rejects a call. None: it isn't
# rejected, or its client has left.
Reject = Callable[[str, Any], "grpc.RpcMethodHandler[Any, Any] | None"]


class _Core(_core.AioServer):  # type: ignore[misc]
    """Accepts calls. `_make_request_call_future` is how grpc.aio waits for each method's next."""

    def __init__(
        self,
        loop: Any,
        guards: Sequence[Any],
        options: Any,
        reject_early: Reject,
        reject_late: Reject,
    ) -> None:
        super().__init__(loop, None, (), guards, options, None)
        self._own_loop = loop
        self._guards = tuple(guards)
        self._handlers: dict[str, Any] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._accepted: AcceptQueue[tuple[str, Any]] = AcceptQueue()
        self._reject_early = reject_early
        self._reject_late = reject_late

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
                self._start(name, state)
                continue
            if not self._accepted:
                self._own_loop.call_soon(self._start_some)
            self._accepted.put((name, state), self._context(state).time_remaining())

    def _start_some(self) -> None:
        """Once a turn, while calls wait."""
        for name, state in self._accepted.take_late():
            self._is_rejected(name, state, self._reject_late)
        num_started, num_taken = 0, 0
        while self._accepted and num_started < MAX_STARTS and num_taken < MAX_TAKEN:
            name, state = self._accepted.take_newest()
            num_taken += 1
            if not self._is_rejected(name, state, self._reject_early):
                self._start(name, state)
                num_started += 1
        if self._accepted:
            self._own_loop.call_soon(self._start_some)

    def _is_rejected(self, name: str, state: Any, reject: Reject) -> bool:
        handler = reject(name, self._context(state))
        if handler is not None:
            self._run(name, state, {name: handler}, ())
        return handler is not None

    def _context(self, state: Any) -> Any:
        return _core._ServicerContext(state, None, None, self._own_loop)

    def _start(self, name: str, state: Any) -> None:
        self._run(name, state, {} if name == UNKNOWN_METHOD else self._handlers, self._guards)

    def _run(self, name: str, state: Any, handlers: dict[str, Any], guards: Sequence[Any]) -> None:
        loop, resolver = self._own_loop, _core._MethodResolver([], handlers)
        answer = _core._handle_rpc(name, resolver, guards, state, loop, False)
        task = loop.create_task(_core._schedule_rpc_coro(answer, state, loop, name))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)


class AcceptingServer(_aio_server.Server):  # type: ignore[misc]
    """As grpc.aio.server() makes one, with a `_Core`."""

    def __init__(
        self,
        guards: Sequence[grpc.aio.ServerInterceptor],
        options: Sequence[tuple[str, Any]],
        reject_early: Reject,
        reject_late: Reject,
    ) -> None:
        self._loop = _core.get_working_loop()
        arguments = _aio_server._augment_channel_arguments(options, None)
        self._server = _Core(self._loop, guards, arguments, reject_early, reject_late)
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
    handle_events()
