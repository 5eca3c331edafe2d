"""`/v1/chat/completions`: conversations in OpenAI's shape.

Knows: their JSON, generation.proto. Does not know: templates, how an answer is made.
"""

from typing import Any

from quill.protos import generation_pb2 as pb
from quill.server.errors import InvalidFieldError
from quill.server.http.openai.generations import (
    COMMON,
    Facts,
    Tally,
    beside,
    includes_usage,
    option_message,
    timings_json,
)
from quill.server.http.openai.logprobs import chat_logprobs, prompt_logprobs
from quill.server.http.openai.models import check_model
from quill.server.http.openai.tool_calls import message_json, piece_json, reason_with_calls
from quill.server.http.wire.exchange import Events, Exchange
from quill.server.http.wire.route import Route
from quill.server.protocol.prompt_fields import ROLES
from quill.server.service.generation_options import REFUSED
from quill.server.service.json_fields import (
    BOOLEAN,
    INTEGER,
    STRING,
    Field,
    Json,
    Kind,
    Refused,
    a,
    refuse,
)
from quill.server.service.origin import Origin
from quill.server.service.tool_options import TOOLS, read_calls

_ROLES = {"developer": "system", "function": "tool"}  # others are what they are


def _messages(name: str, value: Any) -> list[pb.Message]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise refuse(name, value, "a list of objects with role and content")
    return [_message(f"{name}[{number}]", each) for number, each in enumerate(value)]


def _message(name: str, value: Json) -> pb.Message:
    role = value.get("role")
    if not isinstance(role, str):
        raise refuse(f"{name}.role", role, "a string")
    if value.get("function_call"):
        rule = "isn't supported here. Give tool_calls instead"
        raise InvalidFieldError(f"{name}.function_call", rule)
    return pb.Message(
        role=_ROLES.get(role, role),
        content=_content(f"{name}.content", value.get("content")),
        tool_calls=read_calls(f"{name}.tool_calls", value.get("tool_calls") or []),
        tool_call_id=STRING.read(f"{name}.tool_call_id", value.get("tool_call_id") or ""),
        name=_tool_name(f"{name}.name", value),
    )


def _tool_name(name: str, value: Json) -> str:
    """People have names, too, which no template asks for."""
    is_tool = value["role"] in ("tool", "function") and value.get("name") is not None
    return str(STRING.read(name, value["name"])) if is_tool else ""


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
        "role": {"type": "string", "enum": [*ROLES, *_ROLES]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
        "tool_calls": {"type": "array", "items": {"type": "object"}},
        "tool_call_id": {"type": "string"},
    },
    "required": ["role"],
}
CONVERSATION = Kind({"type": "array", "items": _MESSAGE}, _messages)
_TOOLS = "Give tools and tool_choice instead"


class Chat(Route):
    path = "/v1/chat/completions"
    says = "an answer to a conversation"
    fields = (
        Field(
            "messages",
            CONVERSATION,
            "the conversation, oldest first, each with a role and a content",
            is_required=True,
        ),
        *COMMON,
        *TOOLS,
        Field("logprobs", BOOLEAN, "log-probabilities of the answer's tokens"),
        Field("top_logprobs", INTEGER, "and of so many others at each place", "logprobs"),
    )
    refused = (
        *REFUSED,
        Refused("functions", ([],), _TOOLS),
        Refused("function_call", ("none",), _TOOLS),
        Refused("audio", (), "This model is one of text. Leave it out"),
        Refused("modalities", (["text"],), "This model is one of text. Leave it out"),
        Refused("prediction", (), "Leave it out"),
        Refused("web_search_options", (), "Leave it out"),
        Refused("echo", (False,), "Use /v1/completions"),
        Refused("add_generation_prompt", (True,), "The model's turn is always next"),
        Refused("continue_final_message", (False,), "The model's turn is always next"),
        Refused("chat_template", (), "The model has its own"),
    )

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
            rest: Json = {}
            if values.get("return_token_ids"):
                rest["prompt_token_ids"] = list(parsed.given_ids)
            if not values.get("stream"):
                response = await call.generate(parsed)
                await exchange.answer_json(_whole(response, facts, values, rest))
                return
            async with exchange.events() as events:
                stream = _Stream(facts, values, events, rest)
                await call.generate_stream(parsed, stream.send)
                await stream.end()


def _request(values: Json, context: int) -> pb.GenerateRequest:
    message = option_message(values, context, Chat.fields)
    message.messages.messages.extend(values["messages"])
    if values.get("logprobs"):
        message.logprobs = values.get("top_logprobs", 0)
    elif values.get("top_logprobs"):
        raise InvalidFieldError("top_logprobs", "is set, and logprobs isn't true. Set it, too")
    return message


def _whole(response: pb.GenerateResponse, facts: Facts, values: Json, rest: Json) -> Json:
    choices = [
        {
            "index": index,
            "message": message_json(each),
            "logprobs": chat_logprobs(each.logprobs) if values.get("logprobs") else None,
            "finish_reason": reason_with_calls(each, bool(each.tool_calls)),
            **beside(each, values),
        }
        for index, each in enumerate(response.sequences)
    ]
    tally = Tally()
    tally.note(response.usage)
    if "prompt_logprobs" in values:
        rest = rest | {"prompt_logprobs": prompt_logprobs(response.prompt_logprobs)}
    timings = timings_json(response.timings)
    return facts.wrap(choices, usage=tally.json(), timings=timings, **rest)


class _Stream:
    """The answer as chunks. A chunk of each choice's role comes before its first words."""

    def __init__(self, facts: Facts, values: Json, events: Events, first: Json) -> None:
        self._facts = facts
        self._values = values
        self._events = events
        self._first = first  # what only the first chunk says
        self._begun: set[int] = set()
        self._calling: set[int] = set()  # choices that have calls
        self._tally = Tally()

    async def send(self, chunk: pb.GenerateChunk) -> None:
        if "prompt_logprobs" in self._values and chunk.prompt_logprobs:
            self._first["prompt_logprobs"] = prompt_logprobs(chunk.prompt_logprobs)
        if chunk.sequence not in self._begun:
            self._begun.add(chunk.sequence)
            await self._tell(chunk.sequence, {"role": "assistant", "content": ""}, **self._first)
            self._first = {}
        await self._continue(chunk)
        if chunk.finish_reason:
            await self._finish(chunk)

    async def _continue(self, chunk: pb.GenerateChunk) -> None:
        """What is said, then what is called."""
        logprobs = chat_logprobs(chunk.logprobs) if self._values.get("logprobs") else None
        more: Json | None = beside(chunk, self._values)
        says_tokens = bool(chunk.logprobs) or bool(self._values.get("return_token_ids"))
        if chunk.text or (says_tokens and not chunk.tool_calls):
            await self._tell(chunk.sequence, {"content": chunk.text}, logprobs, more)
            logprobs, more = None, None  # are told once
        for piece in chunk.tool_calls:
            self._calling.add(chunk.sequence)
            await self._tell(chunk.sequence, {"tool_calls": [piece_json(piece)]}, logprobs, more)
            logprobs, more = None, None

    async def _finish(self, chunk: pb.GenerateChunk) -> None:
        self._tally.note(chunk.usage)
        reason = reason_with_calls(chunk, chunk.sequence in self._calling)
        more = {**beside(chunk, {}), "finish_reason": reason}
        await self._tell(chunk.sequence, {}, None, more, timings=timings_json(chunk.timings))

    async def _tell(
        self,
        index: int,
        delta: Json,
        logprobs: Json | None = None,
        more: Json | None = None,
        **rest: Any,
    ) -> None:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        if includes_usage(self._values):
            rest["usage"] = None
        await self._events.send(self._facts.wrap([choice | (more or {})], **rest))

    async def end(self) -> None:
        if includes_usage(self._values):
            await self._events.send(self._facts.wrap([], usage=self._tally.json()))
        await self._events.end()
