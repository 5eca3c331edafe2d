"""Puts Quill's own gRPC server where a replica of Ray Serve would start one of its own.

Knows: the one function of Ray 2.60.0 that starts a replica's gRPC server, and who calls it.
Does not know: what the server offers.

Behind HAProxy every replica has a gRPC server, at a port that Ray chooses. Ray's own hands each
message through its machinery, twice the time of ours; it has no interceptors, so API keys would be
looked at after a message was read; its contexts know neither deadlines nor rich errors; and a call
of an unknown method ends it (server/api/unknown_methods.py). So that server is ours, and of Ray's
there remains what HAProxy asks to find out whether a replica lives.

It is a private function: `quill[cluster]` pins Ray exactly, and `make test-cluster` says whether
another Ray has it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import grpc
from ray.serve._private import replica as ray_replica
from ray.serve._private.proxy_request_response import gRPCStreamingType
from ray.serve.generated.serve_pb2 import DESCRIPTOR

from quill.server.cluster.replica.replica_server import Handlers
from quill.server.errors import StartError

RAY = "2.60.0"
HEALTH = DESCRIPTOR.services_by_name["RayServeAPIService"]
_START = "start_grpc_server"


@dataclass(frozen=True)
class Listening:
    """As much of a server as Ray asks of one."""

    server: grpc.aio.Server
    stop: Callable[[float], Awaitable[None]]  # when Ray has let it drain; so long it may take

    async def wait_for_termination(self) -> None:
        await self.server.wait_for_termination()


Start = Callable[[int, str, Handlers], Awaitable[Listening]]


def put_in_place(start: Start) -> None:
    """`start(port, service, handlers)` is called when Ray has chosen the port."""
    found = metadata.version("ray")
    if found != RAY or not hasattr(ray_replica, _START):
        raise StartError(f"this is Ray {found}; Quill needs {RAY}: install 'quill[cluster]'")

    async def start_ours(
        handler_factory: Callable[..., Any],
        grpc_options: Any,
        *,
        event_loop: asyncio.AbstractEventLoop,
        enable_so_reuseport: bool = False,
    ) -> tuple["asyncio.Task[None]", Listening]:
        handlers = _health_handlers(handler_factory)
        try:
            listening = await start(grpc_options.port, HEALTH.full_name, handlers)
        except StartError as error:
            raise RuntimeError(str(error)) from error  # then Ray tries another port
        return event_loop.create_task(listening.wait_for_termination()), listening

    setattr(ray_replica, _START, start_ours)


def _health_handlers(handler_factory: Callable[..., Any]) -> Handlers:
    """Ray's own: they know that a replica is draining."""
    return {
        method.name: grpc.unary_unary_rpc_method_handler(
            handler_factory(
                service_method=f"/{HEALTH.full_name}/{method.name}",
                streaming_type=gRPCStreamingType.UNARY_UNARY,
            )
        )
        for method in HEALTH.methods
    }
