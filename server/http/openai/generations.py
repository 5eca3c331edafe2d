"""What chats and completions have in common, on the way in and on the way out.

Knows: OpenAI's and vLLM's names, generation.proto. Does not know: how a prompt is written.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quill.protos import generation_pb2 as pb
from quill.server.http.openai.models import MODEL, fingerprint
from quill.server.protocol.served_model import ServedModel
from quill.server.service.constraint_options import RESPONSE_FORMAT
from quill.server.service.generation_options import OPTIONS, fill
from quill.server.service.json_fields import BOOLEAN, INTEGER, OBJECT, Field, Json, Kind

# A seed that is picked here can be written in JavaScript, whose numbers have 53 bits.
MAX_PICKED_SEED = 2**53

_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_EOS: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_DEADLINE: "length",  # OpenAI has no word for it: see `beside`
}


def _stream_options(name: str, value: Any) -> Json:
    wanted = OBJECT.read(name, value).get("include_usage")
    return {"include_usage": wanted is not None and BOOLEAN.read(f"{name}.include_usage", wanted)}


_STREAM_OPTIONS = Kind(
    {"type": "object", "properties": {"include_usage": {"type": "boolean"}}}, _stream_options
)
_SAME = "the same as max_tokens, and goes before it"
COMMON = (
    MODEL,
    *OPTIONS,
    RESPONSE_FORMAT,
    Field("max_completion_tokens", INTEGER, _SAME, "max_new_tokens"),
    Field("stream", BOOLEAN, "tell the answer as it is made, as server-sent events"),
    Field("stream_options", _STREAM_OPTIONS, "include_usage: tokens are counted in a last chunk"),
    Field("return_token_ids", BOOLEAN, "the prompt's and the answers' token ids, too"),
)


def option_message(
    values: Json, default_max_tokens: int, fields: Sequence[Field] = COMMON
) -> pb.GenerateRequest:
    """Everything but the prompt."""
    message = pb.GenerateRequest(max_new_tokens=default_max_tokens)
    fill(message, values, fields)
    if not message.HasField("seed"):
        message.seed = secrets.randbelow(MAX_PICKED_SEED)
    return message


def includes_usage(values: Json) -> bool:
    return bool(values.get("stream_options", {}).get("include_usage"))


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


class Tally:
    """What all answers of a call used. A prompt counts once, however many answers it has."""

    def __init__(self) -> None:
        self._prompts: dict[int, pb.Usage] = {}
        self._num_generated = 0

    def note(self, usage: pb.Usage, prompt: int = 0) -> None:
        self._prompts[prompt] = usage
        self._num_generated += usage.generated_tokens

    def json(self) -> Json:
        num_prompt = sum(each.prompt_tokens for each in self._prompts.values())
        num_cached = sum(each.cached_tokens for each in self._prompts.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_generated,
            "total_tokens": num_prompt + self._num_generated,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }


def finish_reason(message: pb.Sequence | pb.GenerateChunk) -> str | None:
    return _FINISH_REASONS.get(message.finish_reason)


def beside(message: pb.Sequence | pb.GenerateChunk, values: Json) -> Json:
    """What OpenAI has no words for, where there is something to say."""
    said: Json = {}
    if message.finish_reason == pb.FINISH_REASON_DEADLINE:
        said["finish_reason"] = "deadline"
    if message.HasField("score"):
        said["score"] = message.score
    found: Json = {"quill": said} if said else {}
    if values.get("return_token_ids"):
        found["token_ids"] = list(message.token_ids)
    return found


def timings_json(timings: pb.Timings) -> Json:
    return {
        "queue_ms": round(timings.queue_ms, 3),
        "first_token_ms": round(timings.first_token_ms, 3),
        "total_ms": round(timings.total_ms, 3),
    }
