"""The messages between frontends and the engine's process.

Knows: msgspec, which values cross. Does not know: sockets' events, what a request means.

Each is a msgpack value in a frame (server/frames.py). Frontends send Submit and End; the engine's
process sends Outputs, one frame a step, and Health.
"""

from typing import Any

import msgspec
import numpy as np

from quill.server import errors, frames
from quill.server.outputs import EngineOutputs, FinishReason
from quill.server.request import Request


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


ToEngine = Submit | End
ToFrontend = Outputs | Health


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, errors.RequestError):
        return errors.plain_error(value)
    if isinstance(value, range):
        return value.start, value.stop
    raise NotImplementedError(type(value))


def _decode(kind: Any, value: Any) -> Any:
    if getattr(kind, "__origin__", kind) is np.ndarray:
        return np.frombuffer(value, np.float32)
    if kind is range:
        return range(*value)
    if kind is errors.RequestError:
        return errors.read_error(value)
    raise NotImplementedError(kind)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode)
TO_ENGINE = msgspec.msgpack.Decoder(ToEngine, dec_hook=_decode)
TO_FRONTEND = msgspec.msgpack.Decoder(ToFrontend, dec_hook=_decode)


def frame(message: ToEngine | ToFrontend) -> bytes:
    return frames.pack(_encoder.encode(message))
