"""What the async and the blocking endpoint pool share: state, health checks, channel options.

Knows: the balancer, gRPC's health service on the wire. Does not know: channels, threads, loops.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.protos import health_pb2
from quill.server.balancing_headers import TELL_LOAD, read_load
from quill.server.client.access import CHANNEL_OPTIONS, Access, ChannelOptions, Metadata
from quill.server.client.balancer import Balancer
from quill.server.client.errors import CallError
from quill.server.client.retry import is_retryable
from quill.server.client.target import Target

logger = logging.getLogger(__name__)

_GENERATE = f"/{pb.DESCRIPTOR.services_by_name['TextGeneration'].full_name}/Generate"
_WATCH = "/grpc.health.v1.Health/Watch"
# A health watch lasts so long: the next one fails if the machine is gone and couldn't say so.
WATCH_S = 10.0
RETRY_WATCH_S = 0.2  # before the health of a server that doesn't serve is watched again
FIRST_STATUS_S = 1.0  # the first call waits so long at most for the first status of all servers
RESOLVE_S = 10.0  # before a DNS name is resolved again


def channel_options(target: Target, access: Access) -> ChannelOptions:
    """Raises if the access can't be used for any of the servers."""
    for server in target.servers if target.name is None else (target.name,):
        access.credentials(server)
    if target.name is None or not access.uses_tls:
        return CHANNEL_OPTIONS
    # Certificates are for the DNS name, not for the addresses that it resolves to.
    return (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", target.name.rpartition(":")[0]))


def make_stub(channel: Any) -> Any:
    """Of a channel of either API, with Generate as a stream of one message. That is the same on
    the wire; but a stream's initial metadata, which has the load, can be read before its end."""
    stub = pb_grpc.TextGenerationStub(channel)
    stub.Generate = channel.unary_stream(
        _GENERATE,
        request_serializer=pb.GenerateRequest.SerializeToString,
        response_deserializer=pb.GenerateResponse.FromString,
    )
    return stub


def watch_health(channel: Any) -> Any:
    """The call, on a channel of either API."""
    watch = channel.unary_stream(
        _WATCH,
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    return watch(health_pb2.HealthCheckRequest(), timeout=WATCH_S)


def is_serving(response: health_pb2.HealthCheckResponse) -> bool:
    return response.status == health_pb2.HealthCheckResponse.SERVING


class WatchEnd(NamedTuple):
    """What the end of a health watch means, and when to watch again."""

    is_serving: bool | None  # None: unchanged
    pause_s: float = RETRY_WATCH_S


def read_watch_end(code: grpc.StatusCode | None, *, had_status: bool) -> WatchEnd:
    if code is grpc.StatusCode.UNIMPLEMENTED:  # there is no health service, but a server
        return WatchEnd(is_serving=True, pause_s=FIRST_STATUS_S)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and had_status:
        return WatchEnd(is_serving=None, pause_s=0.0)
    return WatchEnd(is_serving=False)


@dataclass
class PickedEndpoint:
    """The server for one call. The call ends once: with `end`, or with `fail`."""

    address: str
    stub: Any
    headers: Metadata  # to be sent with the call
    _end: Callable[[str, CallError | None], None]
    _set_load: Callable[[str, int], None]
    _read_error: Callable[[BaseException], CallError]
    _has_ended: bool = False

    def end(self, error: CallError | None = None) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._end(self.address, error)

    def fail(self, raised: BaseException) -> CallError:
        """Ends with what the call raised. The cancellation of the caller's task is raised again."""
        error = None
        try:
            error = self._read_error(raised)
            return error
        finally:
            self.end(error)

    def read_load(self, metadata: Any) -> None:
        """From the initial metadata during the call, or the trailing metadata after success."""
        num_calls = read_load(metadata)
        if num_calls is not None:
            self._set_load(self.address, num_calls)


class PoolState:
    """The servers behind an address. Not thread-safe: the pool has the lock."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.balancer = Balancer(target.balance)
        self._have_status: set[str] = set()
        self.dns_error = ""
        self.headers: Metadata = TELL_LOAD if target.is_watched else ()
        self.set_servers(target.servers)

    def set_servers(self, servers: tuple[str, ...]) -> None:
        self.dns_error = ""
        self._have_status &= set(servers)
        # A server that is watched counts as serving once its health service says so.
        self.balancer.set_servers(servers, are_serving=not self.target.is_watched)

    @property
    def is_ready(self) -> bool:
        """Whether the first status of every server is known, or there is none to wait for."""
        states = self.balancer.states()
        have_all = all(each.address in self._have_status for each in states)
        return not self.target.is_watched or (bool(self.dns_error or states) and have_all)

    def set_serving(self, address: str, is_serving: bool) -> None:
        is_first = address not in self._have_status
        self._have_status.add(address)
        if self.balancer.set_serving(address, is_serving) and not (is_first and is_serving):
            if is_serving:
                logger.info("%s serves again", address)
            else:
                logger.warning("%s doesn't serve: calls go to others until it does", address)

    def begin(self, key: bytes | None, avoid: set[str]) -> str:
        if not self.balancer.states():
            reason = f"no servers are known by the name {self.target.name}: {self.dns_error}"
            raise CallError(grpc.StatusCode.UNAVAILABLE, reason, is_unreached=True)
        return self.balancer.begin(key, avoid, time.monotonic())

    def end(self, address: str, error: CallError | None) -> bool:
        """Whether the server's health is to be watched anew, at once."""
        has_failed = error is not None and is_retryable(error)
        self.balancer.end(address, has_failed=has_failed)
        is_doubtful = has_failed and error is not None and error.retry_after_s is None
        if is_doubtful and self.target.is_watched:
            self.set_serving(address, False)
        return is_doubtful
