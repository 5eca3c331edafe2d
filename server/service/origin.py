"""Where a call comes from: all that is known of it beside its message.

Knows: callers, deadlines, doors. Does not know: what is called, gRPC, HTTP.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from quill.server.auth.caller import ANYBODY, Caller
from quill.server.telemetry.call_record import new_request_id

Frontend = Literal["grpc", "http", "kserve"]


async def _nobody_cares() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Origin:
    method: str  # as the log and the metrics name it
    frontend: Frontend
    caller: Caller = ANYBODY
    deadline_s: float | None = None  # the client's own, on the engine's clock, time.monotonic
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    request_id: str = field(default_factory=new_request_id)
    # Told of each of its requests that is taken in: from now on it is run, or waits for that.
    note_taken_in: Callable[[], Awaitable[None]] = _nobody_cares
