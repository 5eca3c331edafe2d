"""Quill's own wire to several servers, as its clients choose among them.

Knows: fleets, resuming. Does not know: what is asked. What a server refuses or breaks off is asked
at another one, as clients do it, and goes on with the same tokens. Nobody is waited for: where no
other serves, a load test wants to see what fails.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from quill.loadtest.protocols.door import CallError, Chunks
from quill.protos import generation_pb2 as pb
from quill.server.client.access import Access
from quill.server.client.balancer import ServerState
from quill.server.client.errors import CallError as ClientError
from quill.server.client.errors import read_error
from quill.server.client.pool_state import PickedEndpoint
from quill.server.client.requests import with_seed
from quill.server.client.resume import ResumeFilter
from quill.server.client.retry import Attempts, Retries, is_retryable
from quill.server.client.sync_pool import EndpointPool
from quill.server.prefix_header import prefix_key


class FleetDoor:
    """For all users of a process: what each server has outstanding is known together only."""

    def __init__(self, address: str, access: Access | None = None) -> None:
        self._access = access or Access()
        self._fleet = EndpointPool(address, self._access)

    def servers(self) -> tuple[ServerState, ...]:
        return self._fleet.servers()

    def stream(self, request: pb.GenerateRequest, timeout_s: float) -> Chunks:
        asked, given = pb.GenerateRequest(), ResumeFilter()
        asked.CopyFrom(request)
        with_seed(asked)
        attempts, failed = Attempts(Retries(), timeout_s), set[str]()
        while True:
            try:
                for chunk in self._ask(asked, attempts.left_s, failed):
                    new = given.filter(chunk)
                    if new is not None:
                        yield new
                return
            except ClientError as error:
                self._check_other(error, failed)
            given.restart()

    def embed(self, request: pb.EmbedRequest, timeout_s: float) -> pb.EmbedResponse:
        attempts, failed = Attempts(Retries(), timeout_s), set[str]()
        while True:
            try:
                with self._asking(None, failed) as server:
                    metadata = self._access.metadata
                    answer: pb.EmbedResponse = server.stub.Embed(
                        request, timeout=attempts.left_s, metadata=metadata
                    )
                return answer
            except ClientError as error:
                self._check_other(error, failed)

    def close(self) -> None:
        self._fleet.close()

    def _ask(self, request: pb.GenerateRequest, left_s: float | None, failed: set[str]) -> Chunks:
        with self._asking(prefix_key(request), failed) as server:
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
    def _asking(self, key: bytes | None, failed: set[str]) -> Iterator[PickedEndpoint]:
        """One server once. It joins the `failed` if it does."""
        server = self._fleet.pick(key, failed)
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
        """Raises if asking elsewhere is no use, or nobody else serves."""
        if not is_retryable(error) or not self._fleet.has_other(failed):
            raise CallError(error.code.name, error.reason) from error


class SharedDoor(FleetDoor):
    """Stays open until the process ends, whoever closes it."""

    def close(self) -> None:
        pass


@functools.cache
def shared_door(address: str, access: Access) -> SharedDoor:
    return SharedDoor(address, access)
