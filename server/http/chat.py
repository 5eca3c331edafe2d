"""`/v1/chat/completions`: conversations in OpenAI's shape.

Knows: its JSON. Does not know: templates, how an answer is generated.
"""

import secrets
from functools import partial
from typing import Any

from quill.server.errors import InvalidFieldError
from quill.server.fields import GENERATE
from quill.server.frontend.answer import Chunk, Result
from quill.server.frontend.call import RequestContext, has_many_logprobs
from quill.server.frontend.json_options import (
    CONVERSATION,
    TOOLS,
    UNSUPPORTED,
    generate_spec,
    option_fields,
)
from quill.server.frontend.json_values import BOOLEAN, Json, JsonField, Unsupported
from quill.server.frontend.spec import GenerateSpec, Prompt
from quill.server.http.exchange import Events, Exchange
from quill.server.http.output import (
    COMMON,
    MAX_PICKED_SEED,
    AnswerInfo,
    AnswerStream,
    Logprobs,
    TextEvents,
    UsageCount,
    call_delta_json,
    extensions,
    finish_reason,
    message_json,
    timings_json,
)
from quill.server.http.texts import Route, check_model

_TOOLS = "Give tools and tool_choice instead"
_TEXT_ONLY = "This model is one of text. Leave it out"


class Chat(Route):
    path = "/v1/chat/completions"
    help = "an answer to a conversation"
    fields = (
        JsonField(
            "messages",
            CONVERSATION,
            "the conversation, oldest first, each with a role and a content",
            is_required=True,
        ),
        *COMMON,
        *TOOLS,
        JsonField("logprobs", BOOLEAN, "log-probabilities of the answer's tokens"),
        *option_fields(GENERATE["logprobs"], "top_logprobs"),
    )
    unsupported = (
        *UNSUPPORTED,
        Unsupported("functions", ([],), _TOOLS),
        Unsupported("function_call", ("none",), _TOOLS),
        Unsupported("audio", (), _TEXT_ONLY),
        Unsupported("modalities", (["text"],), _TEXT_ONLY),
        Unsupported("prediction", (), "Leave it out"),
        Unsupported("web_search_options", (), "Leave it out"),
        Unsupported("echo", (False,), "Use /v1/completions"),
        Unsupported("add_generation_prompt", (True,), "The model's turn is always next"),
        Unsupported("continue_final_message", (False,), "The model's turn is always next"),
        Unsupported("chat_template", (), "The model has its own"),
    )

    async def answer(self, values: Json, context: RequestContext, exchange: Exchange) -> None:
        async with self._calls.open(context) as call:
            check_model(values, call.served)
            parse = partial(_spec, values, call.served.context)
            parsed = await call.read(parse, exchange.num_bytes)
            info = AnswerInfo(
                id=f"chatcmpl-{context.request_id}",
                kind="chat.completion.chunk" if values.get("stream") else "chat.completion",
                served=call.served,
                seed=parsed.request.seed,
            )
            rest: Json = {}
            if values.get("return_token_ids"):
                rest["prompt_token_ids"] = list(parsed.given_ids)
            if not values.get("stream"):
                result = await call.generate(parsed)
                whole = partial(_whole, result, info, values, rest)
                await exchange.answer_made(whole, has_many_logprobs(result.sequences))
                return
            async with exchange.events() as events:
                stream = _Stream(info, values, events, rest)
                await call.stream(parsed, stream.send)
                await stream.end()


def _spec(values: Json, context: int) -> GenerateSpec:
    if not values.get("logprobs") and values.get("top_logprobs"):
        raise InvalidFieldError("top_logprobs", "is set, and logprobs isn't true. Set it, too")
    defaults = {"max_new_tokens": context, "seed": secrets.randbelow(MAX_PICKED_SEED)}
    if values.get("logprobs"):
        defaults["logprobs"] = 0
    else:
        values = {name: value for name, value in values.items() if name != "top_logprobs"}
    return generate_spec(Prompt("messages", values["messages"]), values, Chat.fields, defaults)


def _whole(result: Result, info: AnswerInfo, values: Json, rest: Json) -> Json:
    logprobs = Logprobs(info.served.text)
    choices = [
        {
            "index": index,
            "message": message_json(each),
            "logprobs": logprobs.chat(each.logprobs) if values.get("logprobs") else None,
            "finish_reason": finish_reason(each.finish, bool(each.calls)),
            **extensions(each, values),
        }
        for index, each in enumerate(result.sequences)
    ]
    usage = UsageCount()
    usage.add(result.usage)
    if "prompt_logprobs" in values:
        prompt = logprobs.prompt(result.sequences[0].prompt_logprobs)
        rest = rest | {"prompt_logprobs": prompt}
    return info.wrap(choices, usage=usage.json(), timings=timings_json(result.timings), **rest)


class _Stream(AnswerStream):
    """The answer as events. An event with each choice's role comes before its first text."""

    def __init__(self, info: AnswerInfo, values: Json, events: Events, first: Json) -> None:
        super().__init__(info, values, events)
        self._first = first  # what only the first event has
        self._calling: set[int] = set()  # choices that have calls

    async def send(self, chunk: Chunk) -> None:
        data = self._begin(chunk) + self._continue(chunk)
        if chunk.finish is not None:
            data += self._finish(chunk)
        if data:
            await self._events.send(data)

    def _begin(self, chunk: Chunk) -> bytes:
        if "prompt_logprobs" in self._values and chunk.prompt_logprobs:
            self._first["prompt_logprobs"] = self._logprobs.prompt(chunk.prompt_logprobs)
        if chunk.sequence in self._texts:
            return b""
        choice = _choice(chunk.sequence, {"content": TextEvents.PLACE})
        self._texts[chunk.sequence] = TextEvents(self._info, choice, **self._rest)
        first, self._first = self._first, {}
        return self._delta(chunk.sequence, {"role": "assistant", "content": ""}, **first)

    def _continue(self, chunk: Chunk) -> bytes:
        """Text, then calls. Logprobs and token ids come with the first of either."""
        values, number = self._values, chunk.sequence
        has_ids = bool(values.get("return_token_ids"))
        more = extensions(chunk, values) if has_ids else {}
        if values.get("logprobs"):
            more["logprobs"] = self._logprobs.chat(chunk.logprobs)
        data = b""
        if chunk.text and not more:
            data = self._texts[number].write(chunk.text)
        elif chunk.text or ((chunk.logprobs or has_ids) and not chunk.calls):
            data, more = self._delta(number, {"content": chunk.text}, more), {}
        for delta in chunk.calls:
            self._calling.add(number)
            data += self._delta(number, {"tool_calls": [call_delta_json(delta)]}, more)
            more = {}
        return data

    def _finish(self, chunk: Chunk) -> bytes:
        assert chunk.finish is not None
        self._usage.add(chunk.finish.usage)
        reason = finish_reason(chunk.finish, chunk.sequence in self._calling)
        more = {**extensions(chunk, {}), "finish_reason": reason}
        timings = timings_json(chunk.finish.timings)
        return self._delta(chunk.sequence, {}, more, timings=timings)

    def _delta(self, index: int, delta: Json, more: Json | None = None, **rest: Any) -> bytes:
        return self._event(_choice(index, delta) | (more or {}), **rest)


def _choice(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
