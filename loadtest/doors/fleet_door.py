"""Quill's own wire to several servers, as its clients choose among them.

Knows: fleets. Does not know: what is asked, clocks. Nothing is asked twice: a load test wants to
see what fails.
"""

import functools

import grpc

from quill.loadtest.doors.door import CallError, Chunks
from quill.loadtest.doors.grpc_door import call_error
from quill.protos import generation_pb2 as pb
from quill.server.client.access import Access
from quill.server.client.balancing.balancer import ServerState
from quill.server.client.balancing.beginning import beginning
from quill.server.client.call_error import CallError as ClientError
from quill.server.client.call_error import read_error
from quill.server.client.fleet import Fleet
from quill.server.client.fleet_state import Lease


class FleetDoor:
    """For all users of a process: what each server has outstanding is known together only."""

    def __init__(self, address: str, access: Access | None = None) -> None:
        self._access = access or Access()
        self._fleet = Fleet(address, self._access)

    def servers(self) -> tuple[ServerState, ...]:
        return self._fleet.servers()

    def stream(self, request: pb.GenerateRequest, timeout_s: float) -> Chunks:
        server = self._take(beginning(request))
        metadata = self._access.metadata
        call = server.stub.GenerateStream(request, timeout=timeout_s, metadata=metadata)
        try:
            server.hear(call.initial_metadata())
            yield from call
            server.end()
            server.hear(call.trailing_metadata())
        except grpc.RpcError as error:
            server.end(read_error(error, self._access))
            raise call_error(error) from error
        finally:
            server.end()
            call.cancel()

    def embed(self, request: pb.EmbedRequest, timeout_s: float) -> pb.EmbedResponse:
        server = self._take(None)
        try:
            metadata = self._access.metadata
            answer: pb.EmbedResponse = server.stub.Embed(
                request, timeout=timeout_s, metadata=metadata
            )
        except grpc.RpcError as error:
            server.end(read_error(error, self._access))
            raise call_error(error) from error
        finally:
            server.end()
        return answer

    def close(self) -> None:
        self._fleet.close()

    def _take(self, key: bytes | None) -> Lease:
        try:
            return self._fleet.take(key, set())
        except ClientError as error:
            raise CallError(error.code.name, error.reason) from error


class SharedDoor(FleetDoor):
    """Stays open until the process ends, whoever closes it."""

    def close(self) -> None:
        pass


@functools.cache
def shared_door(address: str, access: Access) -> SharedDoor:
    return SharedDoor(address, access)
