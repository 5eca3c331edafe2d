"""`/v1/chat/completions`: conversations in OpenAI's shape.

Knows: their JSON, generation.proto. Does not know: templates, how an answer is made.
"""

from collections.abc import Sequence
from typing import Any

from quill.protos import generation_pb2 as pb
from quill.server.errors import InvalidFieldError
from quill.server.http.exchange import Events, Exchange
from quill.server.http.generations import (
    COMMON,
    COMMON_REFUSED,
    Facts,
    beside,
    finish_reason,
    option_message,
    timings_json,
    usage_json,
)
from quill.server.http.models import check_model
from quill.server.http.route import Route
from quill.server.protocol.requests import ParsedRequest
from quill.server.service.call import Call
from quill.server.service.json_fields import BOOLEAN, INTEGER, Field, Json, Kind, Refused, a, refuse
from quill.server.service.origin import Origin
from quill.server.service.service import Service

_ROLES = {"developer": "system"}  # others are what they are


def _messages(name: str, value: Any) -> list[pb.Message]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise refuse(name, value, "a list of objects with role and content")
    return [_message(f"{name}[{number}]", each) for number, each in enumerate(value)]


def _message(name: str, value: Json) -> pb.Message:
    role = value.get("role")
    if not isinstance(role, str):
        raise refuse(f"{name}.role", role, "a string")
    for unsupported in ("tool_calls", "function_call"):
        if value.get(unsupported):
            raise InvalidFieldError(f"{name}.{unsupported}", "isn't supported here. Leave it out")
    content = _content(f"{name}.content", value.get("content"))
    return pb.Message(role=_ROLES.get(role, role), content=content)


def _content(name: str, value: Any) -> str:
    """A text, or parts of one."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise refuse(name, value, "a string, or a list of parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            shown = kind[:40] if isinstance(kind, str) else a(part)
            rule = 'a model of text takes {"type": "text", "text": "…"} only'
            raise InvalidFieldError(name, f"has a part of type {shown!r}; {rule}")
        texts.append(part["text"])
    return "".join(texts)


_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
    },
    "required": ["role"],
}
_CONVERSATION = Kind({"type": "array", "items": _MESSAGE}, _messages)
_NO_TOOLS = "This server calls no tools yet. Leave it out"


class Chat(Route):
    path = "/v1/chat/completions"
    says = "an answer to a conversation"
    fields = (
        Field(
            "messages",
            _CONVERSATION,
            "the conversation, oldest first, each with a role and a content",
            is_required=True,
        ),
        *COMMON,
        Field("logprobs", BOOLEAN, "log-probabilities of the answer's tokens"),
        Field("top_logprobs", INTEGER, "and of so many others at each place", "logprobs"),
    )
    refused = (
        *COMMON_REFUSED,
        Refused("tools", ([],), _NO_TOOLS),
        Refused("tool_choice", ("none", "auto"), _NO_TOOLS),
        Refused("functions", ([],), _NO_TOOLS),
        Refused("function_call", ("none", "auto"), _NO_TOOLS),
        Refused("audio", (), "This model is one of text. Leave it out"),
        Refused("modalities", (["text"],), "This model is one of text. Leave it out"),
        Refused("prediction", (), "Leave it out"),
        Refused("web_search_options", (), "Leave it out"),
    )

    def __init__(self, service: Service) -> None:
        self._service = service

    async def answer(self, values: Json, origin: Origin, exchange: Exchange) -> None:
        async with self._service.call(origin) as call:
            check_model(values, call.served)
            message = _request(values, call.served.context)
            parsed = await call.read(message)
            facts = Facts(
                id=f"chatcmpl-{origin.request_id}",
                kind="chat.completion.chunk" if values.get("stream") else "chat.completion",
                served=call.served,
                seed=message.seed,
            )
            if not values.get("stream"):
                whole = _whole(await call.generate(parsed), facts, values)
                await exchange.answer_json(whole)
                return
            async with exchange.events() as events:
                await _Stream(facts, values, events).run(call, parsed)


def _request(values: Json, context: int) -> pb.GenerateRequest:
    message = option_message(values, default_max_tokens=context)
    message.messages.messages.extend(values["messages"])
    wants = values.get("logprobs", False)
    if wants:
        message.logprobs = values.get("top_logprobs", 0)
    elif "top_logprobs" in values:
        message.ClearField("logprobs")
        if values["top_logprobs"]:
            raise InvalidFieldError("top_logprobs", "is set, and logprobs isn't true. Set it, too")
    return message


def _whole(response: pb.GenerateResponse, facts: Facts, values: Json) -> Json:
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": each.text, "refusal": None},
            "logprobs": _logprobs(each.logprobs, values),
            "finish_reason": finish_reason(each),
            **beside(each),
        }
        for index, each in enumerate(response.sequences)
    ]
    return facts.wrap(
        choices, usage=usage_json([response.usage]), timings=timings_json(response.timings)
    )


class _Stream:
    """The answer as chunks. A chunk of each choice's role comes before its first words."""

    def __init__(self, facts: Facts, values: Json, events: Events) -> None:
        self._facts = facts
        self._values = values
        self._events = events
        self._has_usage = values.get("stream_options", {}).get("include_usage", False)
        self._begun: set[int] = set()
        self._usages: list[pb.Usage] = []

    async def run(self, call: Call, parsed: ParsedRequest) -> None:
        await call.generate_stream(parsed, self._send)
        if self._has_usage:
            await self._events.send(self._facts.wrap([], usage=usage_json(self._usages)))
        await self._events.end()

    async def _send(self, chunk: pb.GenerateChunk) -> None:
        index = chunk.sequence
        if index not in self._begun:
            self._begun.add(index)
            await self._say(index, {"role": "assistant", "content": ""})
        if chunk.text or chunk.logprobs:
            await self._say(index, {"content": chunk.text}, _logprobs(chunk.logprobs, self._values))
        if chunk.finish_reason:
            self._usages.append(chunk.usage)
            await self._end(chunk)

    async def _end(self, chunk: pb.GenerateChunk) -> None:
        choice = {
            "index": chunk.sequence,
            "delta": {},
            "logprobs": None,
            "finish_reason": finish_reason(chunk),
            **beside(chunk),
        }
        await self._tell(choice, timings=timings_json(chunk.timings))

    async def _say(self, index: int, delta: Json, logprobs: Json | None = None) -> None:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        await self._tell(choice)

    async def _tell(self, choice: Json, **rest: Any) -> None:
        if self._has_usage:
            rest["usage"] = None
        await self._events.send(self._facts.wrap([choice], **rest))


def _logprobs(tokens: Sequence[pb.TokenLogprobs], values: Json) -> Json | None:
    if not values.get("logprobs"):
        return None
    content = [
        {**_token(each), "top_logprobs": [_token(one) for one in each.top]} for each in tokens
    ]
    return {"content": content, "refusal": None}


def _token(token: pb.TokenLogprobs | pb.Alternative) -> Json:
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.text.encode()),
    }
