"""Quill's own protocol over gRPC, and what every protocol's client offers.

Knows: generation.proto, gRPC. Does not know: what is requested, clocks.
"""

from collections.abc import Generator
from typing import Protocol

import grpc

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.client.access import Access

# A connection for each user, as from machines of their own.
CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))

Chunks = Generator[pb.GenerateChunk, None, None]


class CallError(Exception):
    """A failed call: the name of a gRPC status, also where the protocol has other names."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message[:200]


class ProtocolClient(Protocol):
    """One user's connection over one protocol. Raises CallErrors."""

    def stream(self, request: pb.GenerateRequest, timeout_s: float) -> Chunks:
        """The chunks of an answer. Closing the generator cancels the request."""

    def embed(self, request: pb.EmbedRequest, timeout_s: float) -> pb.EmbedResponse:
        """UNIMPLEMENTED where the protocol has no embeddings."""

    def close(self) -> None:
        """Ends the connection."""


class GrpcClient:
    def __init__(self, address: str, access: Access | None = None) -> None:
        access = access or Access()
        self._channel = access.channel(address, CHANNEL_OPTIONS)
        self._stub = pb_grpc.TextGenerationStub(self._channel)
        self._metadata = access.metadata

    def stream(self, request: pb.GenerateRequest, timeout_s: float) -> Chunks:
        call = self._stub.GenerateStream(request, timeout=timeout_s, metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise call_error(error) from error
        finally:
            call.cancel()

    def embed(self, request: pb.EmbedRequest, timeout_s: float) -> pb.EmbedResponse:
        try:
            return self._stub.Embed(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise call_error(error) from error

    def get_model(self, wait_for_ready: bool = False) -> pb.Model:
        request, metadata = pb.GetModelRequest(), self._metadata
        try:
            return self._stub.GetModel(
                request, timeout=60, wait_for_ready=wait_for_ready, metadata=metadata
            )
        except grpc.RpcError as error:
            raise call_error(error) from error

    def close(self) -> None:
        self._channel.close()


def call_error(error: grpc.RpcError) -> CallError:
    return CallError(error.code().name, error.details() or "")
