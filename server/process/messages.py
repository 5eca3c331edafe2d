"""The messages between frontends and the engine's process, and their frames on a Unix socket.

Knows: msgspec, which values cross. Does not know: sockets' events, what a request means.

A frame is its length in four bytes and a msgpack value. Frontends send Submit and End; the engine's
process sends Outputs, one frame a step, and Health. The supervisor, which starts both, takes Load,
Release and Serving from a frontend, and answers each Load with Engine or Failed.
"""

import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from quill.server import errors
from quill.server.outputs import EngineOutputs, FinishReason
from quill.server.request import Limits, Request

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 2**30  # a frame beyond it is a bug: the other side is a process of ours


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A frontend has accepted a request."""

    request: Request
    arrived_s: float  # time.monotonic is the same clock in all processes of a machine


class End(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request, or one of its sequences, isn't wanted any more."""

    request_id: str
    sequence: int | None
    reason: FinishReason


class Outputs(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What a step published, as far as it concerns this frontend's requests."""

    outputs: EngineOutputs


class Health(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Whether steps succeed."""

    is_good: bool


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine's process has loaded its bundle and serves at a socket."""

    pid: int
    manifest_sha256: str  # of the manifest that was loaded: the file may have changed since
    precision: str
    limits: Limits
    runtime_version: str
    takes_constraints: bool


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine's process can't serve its bundle."""

    reason: str


class Load(msgspec.Struct, frozen=True, tag=True):
    """A frontend wants an engine that was started after this one; 0: any."""

    after: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """A frontend doesn't need this engine any more."""

    number: int


class Serving(msgspec.Struct, frozen=True, tag=True):
    """A frontend is ready. If it dies, the next one listens at the same ports."""

    port: int
    http_port: int | None
    metrics_port: int | None


class Engine(msgspec.Struct, frozen=True, tag=True):
    """An engine that frontends may connect to."""

    number: int  # counts up from 1
    path: str  # of its socket
    ready: Ready


ToEngine = Submit | End
ToFrontend = Outputs | Health
ToSupervisor = Load | Release | Serving
FromSupervisor = Engine | Failed


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, errors.RequestError):
        return type(value).__name__, str(value), vars(value)
    if isinstance(value, range):
        return value.start, value.stop
    raise NotImplementedError(type(value))


def _decode(kind: Any, value: Any) -> Any:
    if getattr(kind, "__origin__", kind) is np.ndarray:
        return np.frombuffer(value, np.float32)
    if kind is range:
        return range(*value)
    if kind is errors.RequestError:
        name, message, fields = value
        error: errors.RequestError = getattr(errors, name).__new__(getattr(errors, name))
        error.args = (message,)
        vars(error).update(fields)
        return error
    raise NotImplementedError(kind)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode)
TO_ENGINE = msgspec.msgpack.Decoder(ToEngine, dec_hook=_decode)
TO_FRONTEND = msgspec.msgpack.Decoder(ToFrontend, dec_hook=_decode)
LOADED = msgspec.msgpack.Decoder(Ready | Failed, dec_hook=_decode)
TO_SUPERVISOR = msgspec.msgpack.Decoder(ToSupervisor)
FROM_SUPERVISOR = msgspec.msgpack.Decoder(FromSupervisor, dec_hook=_decode)


def frame(message: ToEngine | ToFrontend | Ready | ToSupervisor | FromSupervisor) -> bytes:
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into the bodies of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            end = HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[HEADER.size : end])
            del self._buffer[:end]
            yield body
