"""What whoever is sent to Ray's own proxy hears: UNAVAILABLE, so that it tries again.

Knows: the services' methods, how Ray Serve calls a deployment's. Does not know: why nobody is home.

While HAProxy knows of no replica that is up, it hands calls to a proxy of Ray's own, which calls
the deployment's methods by their names. That way has neither API keys nor deadlines, so nothing is
answered there. Only what is raised keeps its status: a stream that ends without a message would be
an empty answer.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from quill.protos import generation_pb2 as pb
from quill.protos import kserve_pb2 as kserve
from quill.server.errors import UnavailableError

# What Ray's proxy must know of. Each adds a service to a server.
SERVICERS = (
    "quill.protos.generation_pb2_grpc:add_TextGenerationServicer_to_server",
    "quill.protos.generation_pb2_grpc:add_AdministrationServicer_to_server",
    "quill.protos.kserve_pb2_grpc:add_GRPCInferenceServiceServicer_to_server",
    "grpc_health.v1.health_pb2_grpc:add_HealthServicer_to_server",
)
_WORDS = "no replica of this cluster is ready. Try again in a few seconds"


def _refusal(grpc_context: Any) -> UnavailableError:
    grpc_context.set_code(grpc.StatusCode.UNAVAILABLE)
    grpc_context.set_details(_WORDS)
    return UnavailableError(_WORDS)


async def _once(self: object, request: object, grpc_context: Any) -> None:
    raise _refusal(grpc_context)


async def _stream(self: object, request: object, grpc_context: Any) -> AsyncIterator[None]:
    if grpc_context is not None:
        raise _refusal(grpc_context)
    yield None  # never; it makes a generator of it


def refusing_methods() -> dict[str, Callable[..., Any]]:
    """By their names."""
    files = (pb.DESCRIPTOR, kserve.DESCRIPTOR, health_pb2.DESCRIPTOR)
    services = [each for file in files for each in file.services_by_name.values()]
    return {
        method.name: _stream if method.server_streaming else _once
        for service in services
        for method in service.methods
    }
