"""One call from its arrival to its end, in numbers.

Knows: tokens, times, how a call ended. Does not know: texts: a prompt is never logged.
"""

import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quill.server.errors import RejectionReason
from quill.server.outputs import FinishEvent

logger = logging.getLogger(__name__)

# The methods that the engine works for, and what OpenTelemetry calls them (gen_ai.operation.name).
OPERATIONS = {
    "Generate": "text_completion",
    "GenerateStream": "text_completion",
    "Score": "text_completion",
    "Embed": "embeddings",
    "FillMask": "text_completion",
    "ModelInfer": "text_completion",
    "ModelStreamInfer": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


def new_request_id() -> str:
    return secrets.token_hex(8)


@dataclass
class Record:
    method: str
    caller: str = ""  # the name of its API key or certificate, never the key
    request_id: str = field(default_factory=new_request_id)
    arrived_s: float = field(default_factory=time.monotonic)
    outcome: str = "OK"  # the name of a gRPC status
    rejection: RejectionReason | None = None  # None: it wasn't rejected
    bad_field: str = ""  # the name of the one that was refused, never what it held
    finish_reasons: list[str] = field(default_factory=list)
    num_prompt: int = 0
    num_cached: int = 0
    num_generated: int = 0
    num_texts: int | None = None  # that were embedded; None: another kind of call
    num_draft_tokens: int = 0
    num_accepted: int = 0
    has_constraint: bool | None = None  # None: its answers may be anything
    compile_ms: float | None = None  # of its grammar; None: it was cached, or there is none
    queue_ms: float | None = None
    first_token_ms: float | None = None
    total_ms: float = 0.0
    submitted_s: float | None = None  # when it was handed to the engine
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    frontend: str = "grpc"  # through which it came
    model: str = ""  # the name of the model that served then; empty: none was loaded

    def note(self, finish: FinishEvent) -> None:
        """One of its sequences has ended."""
        self.finish_reasons.append(finish.reason)
        self.num_draft_tokens += finish.usage.draft
        self.num_accepted += finish.usage.accepted
        self.queue_ms = finish.timings.queue_ms
        if finish.timings.first_token_ms:
            self.first_token_ms = finish.timings.first_token_ms

    def close(self) -> None:
        self.total_ms = 1000 * (time.monotonic() - self.arrived_s)

    def log(self) -> None:
        """One line, whatever happened."""
        logger.info("request", extra={"fields": self._fields()})

    def _fields(self) -> dict[str, object]:
        fields: dict[str, Any] = dict(vars(self))
        for name in ("arrived_s", "submitted_s", "trace_headers", "model"):
            del fields[name]
        fields["finish_reasons"] = ",".join(self.finish_reasons)
        for name in ("compile_ms", "queue_ms", "first_token_ms", "total_ms"):
            fields[name] = None if fields[name] is None else round(fields[name], 1)
        return {name: value for name, value in fields.items() if value not in (None, "")}
