"""Patch of grpcio: a server that no method name can bring down.

Knows: the private parts of grpc.aio 1.85 that accept calls. Does not know: what the server offers.

Why: grpc.aio decodes the name of an unregistered method as UTF-8 inside the loop that accepts all
calls. A path with the byte 0xff ends that loop, and with it the server and everybody's calls;
whoever can connect can do that, with or without a key. A generic handler, the public way to handle
unknown methods, is asked only after that decoding. All our methods are registered, so calls of
others are accepted here instead: their names aren't decoded, and they end with UNIMPLEMENTED.
When it can go: when the path that tests/server/end_to_end/test_fuzz.py sends gets UNIMPLEMENTED
from a plain `grpc.aio.server()`. The same test fails where another grpcio needs another patch.
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
        """Until the server stops: then `_request_call` raises what grpc's loop expects."""
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
