"""Answers in OpenAI's JSON: what chats and completions share, whole or streamed.

Knows: OpenAI's shapes, vLLM's additions. Does not know: how a prompt is written, HTTP.

An event of a stream is constant JSON around a text: the JSON is written once a choice, and each
chunk only escapes its text.
"""

import codecs
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quill.server.fields import OPENAI_FINISH_REASON
from quill.server.frontend.answer import Chunk, ranked_logprobs
from quill.server.frontend.json_options import OPTIONS, RESPONSE_FORMAT
from quill.server.frontend.json_values import (
    BOOLEAN,
    Json,
    JsonField,
    Kind,
    read_boolean,
    read_object,
)
from quill.server.frontend.served_model import ServedModel
from quill.server.http.exchange import Events, event
from quill.server.http.texts import MODEL
from quill.server.outputs import FinishEvent, PositionLogprobs, Timings, Usage
from quill.server.text.tokenizer import Text
from quill.server.tools import ToolCallDelta, merge_deltas

# A seed that is picked here can be written in JavaScript, whose numbers have 53 bits.
MAX_PICKED_SEED = 2**53
_escape = json.JSONEncoder(ensure_ascii=False).encode


def _stream_options(name: str, value: Any) -> Json:
    wanted = read_object(name, value).get("include_usage")
    return {"include_usage": wanted is not None and read_boolean(f"{name}.include_usage", wanted)}


_STREAM_OPTIONS = Kind(
    {"type": "object", "properties": {"include_usage": {"type": "boolean"}}}, _stream_options
)
COMMON = (
    MODEL,
    *OPTIONS,
    RESPONSE_FORMAT,
    JsonField("stream", BOOLEAN, "send the answer as it is generated, as server-sent events"),
    JsonField("stream_options", _STREAM_OPTIONS, "include_usage: a last chunk has the usage"),
    JsonField("return_token_ids", BOOLEAN, "the token ids of prompt and answers, too"),
)


@dataclass(frozen=True, kw_only=True)
class AnswerInfo:
    """What is the same in all JSON of one answer."""

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
            "model": self.served.name,
            # The same fingerprint and the same seed give the same tokens.
            "system_fingerprint": self.served.fingerprint,
            "seed": self.seed,
            "choices": choices,
            **rest,
        }


class TextEvents:
    """Events that differ in their text only: `choice` is written once, with its text left out."""

    PLACE = "\0"  # stands for the text in `choice`

    def __init__(self, info: AnswerInfo, choice: Json, **rest: Any) -> None:
        written = event(info.wrap([choice], **rest))
        self._head, _, self._tail = written.rpartition(_escape(self.PLACE).encode())

    def write(self, text: str) -> bytes:
        return self._head + _escape(text).encode() + self._tail


class AnswerStream:
    """What a stream of events has in common, whatever its choices look like."""

    def __init__(self, info: AnswerInfo, values: Json, events: Events) -> None:
        self._info = info
        self._values = values
        self._events = events
        self._texts: dict[int, TextEvents] = {}  # by choice
        self._usage = UsageCount()
        self._logprobs = Logprobs(info.served.text)
        includes_usage = values.get("stream_options", {}).get("include_usage")
        self._rest: Json = {"usage": None} if includes_usage else {}

    def _event(self, choice: Json, **rest: Any) -> bytes:
        return event(self._info.wrap([choice], **rest, **self._rest))

    async def end(self) -> None:
        if self._rest:
            await self._events.send(event(self._info.wrap([], usage=self._usage.json())))
        await self._events.end()


class UsageCount:
    """The usage of all answers of a call. A prompt counts once, however many answers it has."""

    def __init__(self) -> None:
        self._prompts: dict[int, Usage] = {}
        self._num_generated = 0

    def add(self, usage: Usage, prompt: int = 0) -> None:
        self._prompts[prompt] = usage
        self._num_generated += usage.generated

    def json(self) -> Json:
        num_prompt = sum(each.prompt for each in self._prompts.values())
        num_cached = sum(each.cached for each in self._prompts.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_generated,
            "total_tokens": num_prompt + self._num_generated,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }


def finish_reason(finish: FinishEvent | None, has_calls: bool = False) -> str | None:
    """Calls are whole only where the answer ended by itself; another reason isn't hidden."""
    if finish is None:
        return None
    if has_calls and finish.reason == "eos":
        return "tool_calls"
    return OPENAI_FINISH_REASON.get(finish.reason)


def extensions(chunk: Chunk, values: Json) -> Json:
    """What OpenAI's JSON has no field for, where there is something to report."""
    own: Json = {}
    if chunk.finish is not None and chunk.finish.reason == "deadline":
        own["finish_reason"] = "deadline"
    if chunk.finish is not None and chunk.finish.score is not None:
        own["score"] = chunk.finish.score
    found: Json = {"quill": own} if own else {}
    if values.get("return_token_ids"):
        found["token_ids"] = chunk.token_ids
    return found


def timings_json(timings: Timings) -> Json:
    return {name: round(each_ms, 3) for name, each_ms in msgspec.structs.asdict(timings).items()}


# -------------------------------------------------------------------------------------- tool calls


def message_json(chunk: Chunk) -> Json:
    """A whole answer to a conversation. Beside calls, no text is null."""
    message: Json = {"role": "assistant", "content": chunk.text, "refusal": None}
    if chunk.calls:
        message["content"] = chunk.text or None
        message["tool_calls"] = [
            {
                "id": each.id,
                "type": "function",
                "function": {"name": each.name, "arguments": each.arguments},
            }
            for each in merge_deltas(chunk.calls)
        ]
    return message


def call_delta_json(delta: ToolCallDelta) -> Json:
    """The first delta of a call names it; clients expect its arguments from the next on."""
    if not delta.id:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": function}


# ---------------------------------------------------------------------------------------- logprobs


class Logprobs:
    """Log-probabilities in the three shapes that clients know. `text` spells tokens."""

    def __init__(self, text: Text | None) -> None:
        self._text = text

    def _spelled(self, token_id: int) -> bytes:
        return b"" if self._text is None else self._text.spelled(token_id)

    def _shown(self, token_id: int) -> str:
        return "" if self._text is None else self._text.piece(token_id)

    def chat(self, tokens: Sequence[PositionLogprobs]) -> Json:
        content = [
            {
                **self._chat_token(each.token_id, each.logprob),
                "top_logprobs": [self._chat_token(*one) for one in each.top],
            }
            for each in tokens
        ]
        return {"content": content, "refusal": None}

    def _chat_token(self, token_id: int, logprob: float | None) -> Json:
        spelled = list(self._spelled(token_id))
        return {"token": self._shown(token_id), "logprob": logprob, "bytes": spelled}

    def completion(self, tokens: Sequence[PositionLogprobs], offsets: "Offsets") -> Json:
        return {
            "tokens": [self._name(each.token_id) for each in tokens],
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [self._top(each) for each in tokens],
            "text_offset": [offsets.add(self._spelled(each.token_id)) for each in tokens],
        }

    def _top(self, token: PositionLogprobs) -> dict[str, float] | None:
        """The token itself is among them, as OpenAI has it. None: it follows nothing."""
        if token.logprob is None:
            return None
        found: dict[str, float] = {}
        for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
            found.setdefault(self._name(token_id), logprob)
        return found

    def prompt(self, tokens: Sequence[PositionLogprobs]) -> list[Json | None]:
        """vLLM's shape."""
        return [
            None if each.logprob is None else ranked_logprobs(each, self._text) for each in tokens
        ]

    def _name(self, token_id: int) -> str:
        """As OpenAI writes parts of characters: as U+FFFD all keys would be the same."""
        spelled = self._spelled(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


class Offsets:
    """Where each token of one choice begins in its text, in characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def add(self, token: bytes) -> int:
        begin = self._offset
        self._offset += len(self._decoder.decode(token))
        return begin
