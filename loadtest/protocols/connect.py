"""Opens a protocol's client by its name; over several servers, one that balances and retries.

Knows: all protocols, Quill's endpoint pool. Does not know: what is requested.
As Quill's own clients do, the pool's client repeats a failed request at another server and resumes
with the same tokens. It doesn't wait for a server to return: a load test must see what fails.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from quill.loadtest.protocols.grpc import CallError, Chunks, GrpcClient, ProtocolClient
from quill.loadtest.protocols.http import HttpClient
from quill.loadtest.protocols.kserve import KserveClient
from quill.loadtest.protocols.names import ProtocolName
from quill.protos import generation_pb2 as pb
from quill.server.balancing_headers import prefix_key
from quill.server.client.access import Access
from quill.server.client.balancer import ServerState
from quill.server.client.errors import CallError as ClientError
from quill.server.client.errors import read_error
from quill.server.client.pool_state import PickedEndpoint
from quill.server.client.requests import with_seed
from quill.server.client.retry import Attempts, ResumeFilter, Retries, is_retryable
from quill.server.client.sync_pool import EndpointPool
from quill.server.client.target import is_multiple


class PoolClient:
    """One for all users of a process: it balances by the outstanding requests of each server."""

    def __init__(self, address: str, access: Access | None = None) -> None:
        self._access = access or Access()
        self._pool = EndpointPool(address, self._access)

    def servers(self) -> tuple[ServerState, ...]:
        return self._pool.servers()

    def stream(self, request: pb.GenerateRequest, timeout_s: float) -> Chunks:
        seeded_request, resume = pb.GenerateRequest(), ResumeFilter()
        seeded_request.CopyFrom(request)
        with_seed(seeded_request)
        attempts, failed = Attempts(Retries(), timeout_s), set[str]()
        while True:
            try:
                for chunk in self._stream_once(seeded_request, attempts.left_s, failed):
                    new = resume.filter(chunk)
                    if new is not None:
                        yield new
                return
            except ClientError as error:
                self._check_other(error, failed)
            resume.restart()

    def embed(self, request: pb.EmbedRequest, timeout_s: float) -> pb.EmbedResponse:
        attempts, failed = Attempts(Retries(), timeout_s), set[str]()
        while True:
            try:
                with self._picked(None, failed) as server:
                    metadata = self._access.metadata
                    answer: pb.EmbedResponse = server.stub.Embed(
                        request, timeout=attempts.left_s, metadata=metadata
                    )
                return answer
            except ClientError as error:
                self._check_other(error, failed)

    def close(self) -> None:
        self._pool.close()

    def _stream_once(
        self, request: pb.GenerateRequest, left_s: float | None, failed: set[str]
    ) -> Chunks:
        with self._picked(prefix_key(request), failed) as server:
            metadata = self._access.metadata + server.headers
            call = server.stub.GenerateStream(request, timeout=left_s, metadata=metadata)
            try:
                server.read_load(call.initial_metadata())
                yield from call
                server.end()
                server.read_load(call.trailing_metadata())
            finally:
                call.cancel()

    @contextmanager
    def _picked(self, key: bytes | None, failed: set[str]) -> Iterator[PickedEndpoint]:
        """One server for one attempt. It joins `failed` if the attempt fails."""
        server = self._pool.pick(key, failed)
        try:
            yield server
        except grpc.RpcError as raised:
            failed.add(server.address)
            error = read_error(raised, self._access)
            server.end(error)
            raise error from raised
        finally:
            server.end()

    def _check_other(self, error: ClientError, failed: set[str]) -> None:
        """Raises if another server would fail, too, or none is left."""
        if not is_retryable(error) or not self._pool.has_other(failed):
            raise CallError(error.code.name, error.reason) from error


class SharedPoolClient(PoolClient):
    """Stays open until the process ends: all users share it."""

    def close(self) -> None:
        pass


@functools.cache
def shared_pool(address: str, access: Access) -> SharedPoolClient:
    return SharedPoolClient(address, access)


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
