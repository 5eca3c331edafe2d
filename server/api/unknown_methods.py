"""A gRPC server that no name of a method can bring down.

Knows: the parts of grpc.aio 1.85 that take calls in. Does not know: what the server offers.

grpc.aio reads the name of a method that isn't registered as UTF-8 inside the loop that takes in all
calls. A path with the byte 0xff ends that loop, and with it the server and everybody's calls:
anybody who can connect can do that, with or without a key. All our methods are registered, so calls
of others are taken in here instead: their names aren't read, and they are told UNIMPLEMENTED.
`tests/server/end_to_end/test_fuzz.py` sends such a path, and fails where another grpcio needs
another cure.
"""

import asyncio
import importlib
from collections.abc import Sequence
from typing import Any

import grpc

_aio_server: Any = importlib.import_module("grpc.aio._server")
_core: Any = importlib.import_module("grpc._cython.cygrpc")

UNKNOWN_METHOD = "/unknown/unknown"  # instead of the name


class _Core(_core.AioServer):  # type: ignore[misc]
    """Takes calls in. `_make_request_call_future(None)` is how it waits for unregistered ones."""

    def __init__(self, loop: Any, guards: Sequence[Any], options: Any) -> None:
        super().__init__(loop, None, (), guards, options, None)
        self._own_loop = loop
        self._guards = tuple(guards)
        self._refusals: set[asyncio.Task[None]] = set()

    def _make_request_call_future(self, method: bytes | None) -> Any:
        if method is not None:
            return super()._make_request_call_future(method)
        return self._own_loop.create_task(self._refuse_unknown())

    async def _refuse_unknown(self) -> None:
        """Until the server stops, which `_request_call` tells by an exception for grpc's loop."""
        nothing, loop = _core._MethodResolver([], {}), self._own_loop
        while True:
            state = await self._request_call()
            answer = _core._handle_rpc(UNKNOWN_METHOD, nothing, self._guards, state, loop, False)
            call = _core._schedule_rpc_coro(answer, state, loop, UNKNOWN_METHOD)
            task = loop.create_task(call)
            self._refusals.add(task)
            task.add_done_callback(self._refusals.discard)


class UnknownMethodsServer(_aio_server.Server):  # type: ignore[misc]
    """As grpc.aio.server() makes one."""

    def __init__(
        self, guards: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, Any]]
    ) -> None:
        self._loop = _core.get_working_loop()
        arguments = _aio_server._augment_channel_arguments(options, None)
        self._server = _Core(self._loop, guards, arguments)


def make_unknown_methods_server(
    guards: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, Any]]
) -> grpc.aio.Server:
    server: grpc.aio.Server = UnknownMethodsServer(guards, options)
    return server
