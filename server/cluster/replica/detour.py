"""Calls that come by Ray's own proxy: handed to this replica's own server, where all others go.

Knows: the services' methods, how Ray Serve calls a deployment's. Does not know: what is called.

While HAProxy knows of no replica that is up, it hands calls to a proxy of Ray's own, which calls
the deployment's methods by their names: for the two seconds that Ray takes to look at a changed
serve.yaml, and before HAProxy has heard of the first replica. That way has neither API keys nor
rich errors, so nothing is answered here: the replica's own server is asked, with the caller's own
metadata. What gets lost is the details of errors; a deadline comes as a cancellation.

Ray's proxy listens on all interfaces, whatever replicas do. Those that are for their machine alone
answer only who came to it from there, as HAProxy does.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol
from urllib.parse import unquote

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from quill.protos import generation_pb2 as pb
from quill.protos import kserve_pb2 as kserve
from quill.server.addresses import DIRECTLY, is_loopback
from quill.server.errors import RequestError

# What Ray's proxy must know of. Each adds a service to a server.
SERVICERS = (
    "quill.protos.generation_pb2_grpc:add_TextGenerationServicer_to_server",
    "quill.protos.generation_pb2_grpc:add_AdministrationServicer_to_server",
    "quill.protos.kserve_pb2_grpc:add_GRPCInferenceServiceServicer_to_server",
    "grpc_health.v1.health_pb2_grpc:add_HealthServicer_to_server",
)
_WORDS = "no replica of this cluster is ready. Try again in a few seconds"
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.enable_retries", 0), *DIRECTLY]
_OF_THE_CONNECTION = ("user-agent", "content-type", "te")


class Detour:
    """To the server of this process. Belongs to one event loop."""

    def __init__(self, loopback_only: bool) -> None:
        self._loopback_only = loopback_only
        self._channel: grpc.aio.Channel | None = None

    def open(self, address: str) -> None:
        """Where the server listens."""
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def once(self, method: MethodDescriptor, request: Any, context: Any) -> Any:
        try:
            return await self._asker(method, context)(request, metadata=_metadata(context))
        except grpc.aio.AioRpcError as error:
            raise _refusal(context, error.code(), error.details() or "") from error

    async def stream(
        self, method: MethodDescriptor, request: Any, context: Any
    ) -> AsyncIterator[Any]:
        if method.client_streaming:  # Ray has a stream of its own for what comes
            raise _refusal(context, grpc.StatusCode.UNAVAILABLE, _WORDS)
        call = self._asker(method, context)(request, metadata=_metadata(context))
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise _refusal(context, error.code(), error.details() or "") from error
        finally:
            call.cancel()  # if the caller has left

    def _asker(self, method: MethodDescriptor, context: Any) -> Any:
        if self._channel is None or (self._loopback_only and not _is_from_here(context.peer())):
            raise _refusal(context, grpc.StatusCode.UNAVAILABLE, _WORDS)
        make = self._channel.unary_stream if method.server_streaming else self._channel.unary_unary
        return make(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )


class HasDetour(Protocol):
    detour: Detour


def detouring_methods() -> dict[str, Callable[..., Any]]:
    """By their names, as a deployment has them."""
    files = (pb.DESCRIPTOR, kserve.DESCRIPTOR, health_pb2.DESCRIPTOR)
    services = [each for file in files for each in file.services_by_name.values()]
    return {
        method.name: _stream(method) if method.server_streaming else _once(method)
        for service in services
        for method in service.methods
    }


def _once(method: MethodDescriptor) -> Callable[..., Any]:
    async def once(self: HasDetour, request: Any, grpc_context: Any) -> Any:
        return await self.detour.once(method, request, grpc_context)

    return once


def _stream(method: MethodDescriptor) -> Callable[..., Any]:
    async def stream(self: HasDetour, request: Any, grpc_context: Any) -> AsyncIterator[Any]:
        async for message in self.detour.stream(method, request, grpc_context):
            yield message

    return stream


def _is_from_here(peer: str) -> bool:
    """As gRPC writes it: ipv4:127.0.0.1:4711, ipv6:%5B::1%5D:4711."""
    _, _, address = peer.partition(":")
    host, _, _ = unquote(address).rpartition(":")
    return is_loopback(host.strip("[]"))


def _metadata(context: Any) -> list[tuple[str, str | bytes]]:
    """The caller's, and not those of the connections on the way."""
    return [
        (name, value)
        for name, value in context.invocation_metadata()
        if not name.startswith(("grpc-", ":")) and name not in _OF_THE_CONNECTION
    ]


def _refusal(context: Any, code: grpc.StatusCode, words: str) -> RequestError:
    """Only what is raised keeps its status: a stream that just ends would be an empty answer."""
    context.set_code(code)
    context.set_details(words)
    return RequestError(words)
