"""What a server says of its health, for as long as somebody listens.

Knows: grpc.health.v1 on the wire. Does not know: what is made of it, threads, loops.
"""

from dataclasses import dataclass
from typing import Any

import grpc

from quill.protos import health_pb2 as pb

_METHOD = "/grpc.health.v1.Health/Watch"
QUESTION = pb.HealthCheckRequest()
# A server is listened to for so long at a time: one that is gone without a word, machine and all,
# isn't heard the next time.
WATCH_S = 10.0
LOOK_S = 0.2  # before one that doesn't serve is asked again
HEAR_S = 1.0  # the first call waits so long at most for all servers' first words
RESOLVE_S = 10.0  # before a name is looked up again
# A server that comes back is found soon: gRPC's own pause grows to two minutes.
RECONNECT_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
)


def watching(channel: Any) -> Any:
    """The method, of a channel of either kind."""
    return channel.unary_stream(
        _METHOD,
        request_serializer=pb.HealthCheckRequest.SerializeToString,
        response_deserializer=pb.HealthCheckResponse.FromString,
    )


def is_serving(word: pb.HealthCheckResponse) -> bool:
    return word.status == pb.HealthCheckResponse.SERVING


@dataclass(frozen=True)
class Silence:
    """What it means that no more is heard, and when to ask again."""

    is_serving: bool | None  # None: as it was
    pause_s: float = LOOK_S


def read_silence(code: grpc.StatusCode | None, was_heard: bool) -> Silence:
    if code is grpc.StatusCode.UNIMPLEMENTED:  # there is no such service, but somebody answers
        return Silence(is_serving=True, pause_s=HEAR_S)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and was_heard:
        return Silence(is_serving=None, pause_s=0.0)
    return Silence(is_serving=False)
