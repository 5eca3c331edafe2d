"""Quill's own wire.

Knows: gRPC. Does not know: what is asked, clocks.
"""

import grpc

from quill.loadtest.protocols.door import CallError, Chunks
from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.client.access import Access

# A connection for each user, as from machines of their own.
CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))


class GrpcDoor:
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

    def get_model(self) -> pb.Model:
        request = pb.GetModelRequest()
        return self._stub.GetModel(request, timeout=60, metadata=self._metadata)

    def close(self) -> None:
        self._channel.close()


def call_error(error: grpc.RpcError) -> CallError:
    return CallError(error.code().name, error.details() or "")
