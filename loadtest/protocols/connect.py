"""Opens a protocol's client by its name; over several servers, one that balances and retries.

Knows: all protocols, Quill's own client. Does not know: what is requested.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quill.loadtest.protocols.grpc import CallError, Chunks, GrpcClient, ProtocolClient
from quill.loadtest.protocols.http import HttpClient
from quill.loadtest.protocols.kserve import KserveClient
from quill.loadtest.protocols.names import ProtocolName
from quill.protos import generation_pb2 as pb
from quill.server.client.access import Access
from quill.server.client.errors import CallError as ClientError
from quill.server.client.retry import Retries, is_retryable
from quill.server.client.sync_client import Client
from quill.server.client.target import is_multiple


class OtherServer(Retries):
    """Only another server is called, at once: a load test must see what fails."""

    def delay_s(self, error: ClientError, num_failed: int, left_s: float | None) -> float | None:
        """`left_s` is None where another server serves: its calls have deadlines."""
        return 0.0 if left_s is None and is_retryable(error) else None


class PoolClient:
    """One for all users of a process: it balances by the outstanding requests of each server."""

    def __init__(
        self, address: str, access: Access | None = None, retries: Retries | None = None
    ) -> None:
        self._client = Client(address, retries or OtherServer(), access=access)
        self.servers = self._client.servers
        self.close = self._client.close

    def stream(self, request: pb.GenerateRequest, timeout_s: float) -> Chunks:
        seeded = pb.GenerateRequest()
        seeded.CopyFrom(request)
        with _errors_translated():
            yield from self._client.stream_request(seeded, timeout_s, resume=True)

    def embed(self, request: pb.EmbedRequest, timeout_s: float) -> pb.EmbedResponse:
        with _errors_translated():
            return self._client.embed_request(request, timeout_s)


@contextmanager
def _errors_translated() -> Iterator[None]:
    try:
        yield
    except ClientError as error:
        raise CallError(error.code.name, error.reason) from error


@functools.cache
def shared_pool(address: str, access: Access) -> PoolClient:
    """Stays open until the process ends: all users share it."""
    client = PoolClient(address, access)
    client.close = lambda: None
    return client


_CLIENTS: dict[ProtocolName, Callable[[str, Access], ProtocolClient]] = {
    "grpc": GrpcClient,
    "http": HttpClient,
    "kserve": KserveClient,
}


def connect(protocol: ProtocolName, address: str, access: Access) -> ProtocolClient:
    """`address`: the HTTP port's for HTTP, else the gRPC port's; several servers for gRPC only."""
    if is_multiple(address):
        assert protocol == "grpc", "the options reject the others"
        return shared_pool(address, access)
    return _CLIENTS[protocol](address, access)
