"""What both kinds of fleet know of their servers, and how they tell of it.

Knows: the balancer, who was heard from. Does not know: channels, threads, loops.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.client.access import CHANNEL_OPTIONS, Access
from quill.server.client.balancing.balancer import Balancer
from quill.server.client.balancing.target import Target
from quill.server.client.call_error import CallError
from quill.server.client.health import RECONNECT_OPTIONS
from quill.server.client.retry import is_passing
from quill.server.load_header import TELL_LOAD, read_load

logger = logging.getLogger(__name__)

ChannelOptions = tuple[tuple[str, Any], ...]
Headers = tuple[tuple[str, str], ...]
_GENERATE = f"/{pb.DESCRIPTOR.services_by_name['TextGeneration'].full_name}/Generate"


def channel_options(target: Target, access: Access) -> ChannelOptions:
    """Raises if the access can't be used for any of the servers."""
    for server in target.servers if target.name is None else (target.name,):
        access.credentials(server)
    if not target.is_watched:
        return CHANNEL_OPTIONS
    options: ChannelOptions = (*CHANNEL_OPTIONS, *RECONNECT_OPTIONS)
    if target.name is None or not access.uses_tls:
        return options
    # Certificates are for the name, and not for the addresses that it stands for.
    return (*options, ("grpc.ssl_target_name_override", target.name.rpartition(":")[0]))


def closed() -> CallError:
    return CallError(grpc.StatusCode.CANCELLED, "the client was closed")


def make_stub(channel: Any) -> Any:
    """Of a channel of either kind, with Generate as a stream of one message. That is the same on
    the wire; but only a stream's headers, which tell of the load, can be read before its end."""
    stub = pb_grpc.TextGenerationStub(channel)
    stub.Generate = channel.unary_stream(
        _GENERATE,
        request_serializer=pb.GenerateRequest.SerializeToString,
        response_deserializer=pb.GenerateResponse.FromString,
    )
    return stub


@dataclass
class Lease:
    """A server for one call. `end` it once, with the error if there was one."""

    address: str
    stub: Any
    headers: Headers  # to be sent with its call
    _end: Callable[[str, CallError | None], None]
    _hear: Callable[[str, int | None], None]
    _is_over: bool = False

    def end(self, error: CallError | None = None) -> None:
        if not self._is_over:
            self._is_over = True
            self._end(self.address, error)

    def hear(self, metadata: Any) -> None:
        """The call's headers, while it goes on, or its trailers after its good end. That a server
        doesn't tell is seen at the end alone: a refusal has no word either."""
        num_calls = read_load(metadata)
        if num_calls is not None or self._is_over:
            self._hear(self.address, num_calls)


class FleetState:
    def __init__(self, target: Target) -> None:
        self.target = target
        self.balancer = Balancer(target.balance)
        self._heard: set[str] = set()
        self.problem = ""  # why the name can't be looked up
        self.headers: Headers = TELL_LOAD if target.is_watched else ()
        self.set_servers(target.servers)

    def set_servers(self, servers: tuple[str, ...]) -> None:
        self.problem = ""
        self._heard &= set(servers)
        # Who is watched is believed when it says so.
        self.balancer.set_servers(servers, are_serving=not self.target.is_watched)

    @property
    def is_known(self) -> bool:
        """Whether there is nobody whose first word is to be waited for."""
        states = self.balancer.states()
        all_heard = all(each.address in self._heard for each in states)
        return not self.target.is_watched or (bool(self.problem or states) and all_heard)

    def note(self, address: str, is_serving: bool) -> None:
        is_first = address not in self._heard
        self._heard.add(address)
        if self.balancer.note(address, is_serving) and not (is_first and is_serving):
            if is_serving:
                logger.info("%s serves again", address)
            else:
                logger.warning("%s doesn't serve: others are asked until it does", address)

    def begin(self, key: bytes | None, avoid: set[str]) -> str:
        if not self.balancer.states():
            reason = f"no servers are known by the name {self.target.name}: {self.problem}"
            raise CallError(grpc.StatusCode.UNAVAILABLE, reason)
        return self.balancer.begin(key, avoid, time.monotonic())

    def hear(self, address: str, num_calls: int | None) -> None:
        self.balancer.hear(address, num_calls, time.monotonic())

    def end(self, address: str, error: CallError | None) -> bool:
        """Whether the server is to be asked at once how it is."""
        failed = error is not None and is_passing(error)
        self.balancer.end(address, has_failed=failed)
        is_doubtful = failed and error is not None and error.retry_after_s is None
        if is_doubtful and self.target.is_watched:
            self.note(address, False)
        return is_doubtful
