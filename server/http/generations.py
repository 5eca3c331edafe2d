"""What chats and completions have in common, on the way in and on the way out.

Knows: OpenAI's and vLLM's names, generation.proto. Does not know: how a prompt is written.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quill.protos import generation_pb2 as pb
from quill.server.http.models import MODEL, fingerprint
from quill.server.protocol.served_model import ServedModel
from quill.server.service.generation_options import OPTIONS, REFUSED, fill
from quill.server.service.json_fields import BOOLEAN, INTEGER, Field, Json, Kind, Refused, refuse

# A seed that is picked here can be written in JavaScript, whose numbers have 53 bits.
MAX_PICKED_SEED = 2**53

_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_EOS: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_DEADLINE: "length",  # OpenAI has no word for it: see _beside
}


def _stream_options(name: str, value: Any) -> Json:
    if not isinstance(value, dict):
        raise refuse(name, value, "an object")
    wanted = value.get("include_usage")
    return {"include_usage": wanted is not None and BOOLEAN.read(f"{name}.include_usage", wanted)}


_STREAM_OPTIONS = Kind(
    {"type": "object", "properties": {"include_usage": {"type": "boolean"}}}, _stream_options
)
COMMON = (
    MODEL,
    *OPTIONS,
    Field(
        "max_completion_tokens", INTEGER, "the same as max_tokens, and goes before it",
        "max_new_tokens",
    ),
    Field("stream", BOOLEAN, "tell the answer as it is made, as server-sent events"),
    Field("stream_options", _STREAM_OPTIONS, "include_usage: tokens are counted in a last chunk"),
    Field("return_token_ids", BOOLEAN, "the prompt's and the answers' token ids, too"),
)  # fmt: skip
COMMON_REFUSED = (
    *REFUSED,
    Refused("response_format", ({"type": "text"},), 'Leave it out, or give {"type": "text"}'),
)


def option_message(values: Json, default_max_tokens: int) -> pb.GenerateRequest:
    """Everything but the prompt."""
    message = pb.GenerateRequest(max_new_tokens=default_max_tokens)
    fill(message, values, COMMON)
    if not message.HasField("seed"):
        message.seed = secrets.randbelow(MAX_PICKED_SEED)
    return message


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is the same in everything that is said of an answer."""

    id: str
    kind: str  # `object`
    served: ServedModel
    seed: int
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, choices: Sequence[Json], **rest: Any) -> Json:
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.served.manifest.name,
            "system_fingerprint": fingerprint(self.served),
            "seed": self.seed,
            "choices": choices,
            **rest,
        }


def finish_reason(message: pb.Sequence | pb.GenerateChunk) -> str | None:
    return _FINISH_REASONS.get(message.finish_reason)


def beside(message: pb.Sequence | pb.GenerateChunk) -> Json:
    """What OpenAI has no words for, where there is something to say."""
    said: Json = {}
    if message.finish_reason == pb.FINISH_REASON_DEADLINE:
        said["finish_reason"] = "deadline"
    if message.HasField("score"):
        said["score"] = message.score
    return {"quill": said} if said else {}


def usage_json(usages: Sequence[pb.Usage], num_prompts: int = 1) -> Json:
    """Of one prompt's sequences, or of one usage for each prompt."""
    counted = usages if num_prompts > 1 else usages[:1]
    prompt = sum(each.prompt_tokens for each in counted)
    cached = sum(each.cached_tokens for each in counted)
    generated = sum(each.generated_tokens for each in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def timings_json(timings: pb.Timings) -> Json:
    return {
        "queue_ms": round(timings.queue_ms, 3),
        "first_token_ms": round(timings.first_token_ms, 3),
        "total_ms": round(timings.total_ms, 3),
    }
