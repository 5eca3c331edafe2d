"""The messages between the supervisor, frontends and engines: how they start, what they share.

Knows: msgspec, what a process is started with. Does not know: requests, numpy, gRPC.

Each process gets a socket, from which it first reads what it was started with. A frontend sends
Load, Release and Serving, and gets Engine or Failed for each Load. An engine sends Ready or Failed,
and gets a connected socket for each frontend. The rest is for servers with several frontends: what
they must count together is counted by the supervisor (counts.py).
"""

import os
import pickle
import socket
from typing import Any

import msgspec

from quill.server.auth.caller import Caller
from quill.server.errors import PlainError
from quill.server.frames import pack, receive
from quill.server.telemetry.merged_metrics import Family

# How long a thread that works in Python may keep others waiting. While a body of 4 MiB was read,
# the median gap of 8 streams was 30 ms with Python's own 5 ms, and 20 with this; 14 without one.
TURN_S = 0.001


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine's process has loaded its bundle."""

    pid: int
    info: msgspec.Raw  # EngineInfo, which only frontends read


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine's process can't serve its bundle."""

    reason: str


class Load(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A frontend wants an engine that was started after this one; 0: any."""

    after: int


class Release(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A frontend doesn't need this engine any more."""

    number: int


class Serving(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A frontend serves an engine's bundle. If it dies, the next one listens at the same ports."""

    engine: int
    port: int
    http_port: int | None
    metrics_port: int | None


class Engine(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An engine. A socket that is connected to it comes with this message."""

    number: int  # counts up from 1
    ready: Ready


class Newer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Another frontend serves this engine's bundle: all shall."""

    number: int


# ---------------------------------------------------------- what several frontends count together
# A frontend numbers its questions, and its tickets (server/auth/tickets.py).


class Admit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A place in the queue for a request."""

    number: int
    request_id: str
    owner: str
    deadline_s: float | None


class OpenCall(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A call of a caller with quotas begins."""

    number: int
    ticket: int
    caller: Caller


class OpenTokens(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request of a caller with a quota of tokens begins."""

    number: int
    ticket: int
    caller: Caller
    num_prompt: int
    is_admitted: bool


class Close(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What OpenCall or OpenTokens opened has ended."""

    number: int
    ticket: int
    num_generated: int
    is_read: bool


class Collect(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The metrics of all frontends together."""

    number: int


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the questions above."""

    number: int
    error: PlainError | None = None
    metrics: list[Family] = []


class Generated(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Tokens so far, by ticket."""

    num_generated: dict[int, int]


class Left(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Requests that left the queue."""

    started: list[str]
    failed: list[str]


class Report(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A frontend shall send its metrics."""


class Samples(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A frontend's metrics."""

    metrics: list[Family]


Question = Admit | OpenCall | OpenTokens | Close | Collect
ToSupervisor = Load | Release | Serving | Question | Generated | Left | Samples
FromSupervisor = Engine | Failed | Newer | Answer | Report

LOADED = msgspec.msgpack.Decoder(Ready | Failed)
TO_SUPERVISOR = msgspec.msgpack.Decoder(ToSupervisor)
FROM_SUPERVISOR = msgspec.msgpack.Decoder(FromSupervisor)
_encoder = msgspec.msgpack.Encoder()


def control_frame(message: Ready | ToSupervisor | FromSupervisor) -> bytes:
    return pack(_encoder.encode(message))


def start_frame(*values: Any) -> bytes:
    """The first frame that a process gets: what it is to serve, and how."""
    return pack(pickle.dumps(values))


def read_start(control: socket.socket) -> Any:
    """The values of `start_frame`, from the process that started this one. If that one has gone,
    this one ends."""
    try:
        return pickle.loads(receive(control))
    except (OSError, EOFError):
        os._exit(0)
