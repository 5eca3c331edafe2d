"""`/v1/completions`: texts that are continued, in OpenAI's older shape, several at once.

Knows: its JSON. Does not know: how an answer is generated.

A list of prompts is one call and so many requests. All have the call's seed, and are answered as if
each had been sent by itself; choices come in the order of the prompts.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from quill.server.errors import InvalidFieldError
from quill.server.fields import GENERATE
from quill.server.frontend.answer import Chunk, Result
from quill.server.frontend.call import MAX_INLINE_TOKENS, Call, RequestContext
from quill.server.frontend.json_options import UNSUPPORTED, generate_spec, option_fields
from quill.server.frontend.json_values import INTEGER, Json, JsonField, Unsupported
from quill.server.frontend.spec import GenerateSpec, ParsedRequest, Prompt
from quill.server.http.exchange import Events, Exchange
from quill.server.http.output import (
    COMMON,
    MAX_PICKED_SEED,
    AnswerInfo,
    AnswerStream,
    Logprobs,
    Offsets,
    TextEvents,
    UsageCount,
    extensions,
    finish_reason,
    timings_json,
)
from quill.server.http.texts import PROMPTS, Route, TextOrIds, check_model

DEFAULT_MAX_TOKENS = 16  # OpenAI's
_Result = TypeVar("_Result")

# So many of a call's requests at once, and no more than this share of the queue.
MAX_AT_ONCE = 32
QUEUE_SHARE = 4


class Completions(Route):
    path = "/v1/completions"
    help = "continuations of texts"
    fields = (
        JsonField("prompt", PROMPTS, "a text or token ids, or a list of such", is_required=True),
        *COMMON,
        *option_fields(GENERATE["logprobs"]),
        *option_fields(GENERATE["echo"]),
        JsonField("best_of", INTEGER, "the same as n; more isn't supported"),
    )
    unsupported = (*UNSUPPORTED, Unsupported("suffix", ("",), "The model has no infilling"))

    async def answer(self, values: Json, context: RequestContext, exchange: Exchange) -> None:
        async with self._calls.open(context) as call:
            check_model(values, call.served)
            parsed = await _read(call, values)
            info = AnswerInfo(
                id=f"cmpl-{context.request_id}",
                kind="text_completion",
                served=call.served,
                seed=parsed[0].request.seed,
            )
            if values.get("stream"):
                async with exchange.events() as events:
                    stream = _Stream(info, values, events)
                    works = [
                        partial(call.stream, each, partial(stream.send, number, each))
                        for number, each in enumerate(parsed)
                    ]
                    await _together(call, works)
                    await stream.end()
                return
            results = await _together(call, [partial(call.generate, each) for each in parsed])
            whole = partial(_whole, results, parsed, info, values)
            num_tokens = sum(each.usage.prompt + each.usage.generated for each in results)
            await exchange.answer_made(whole, is_long=num_tokens > MAX_INLINE_TOKENS)


async def _read(call: Call, values: Json) -> list[ParsedRequest]:
    """All prompts are checked before the first is submitted: a call is rejected as a whole."""
    if values.get("best_of", values.get("n", 1)) > values.get("n", 1):
        raise InvalidFieldError("best_of", "is above n, which isn't supported here. Give num_beams")
    seed, parsed = secrets.randbelow(MAX_PICKED_SEED), []
    for prompt in values["prompt"]:
        size = len(prompt) if isinstance(prompt, str) else 2 * len(prompt)
        each = await call.read(partial(_spec, values, prompt, seed), size)
        if _only_scores(values):
            each = replace(each, request=replace(each.request, max_new_tokens=0))
        parsed.append(each)
        await asyncio.sleep(0)  # other tasks run between two prompts
    return parsed


def _spec(values: Json, prompt: TextOrIds, seed: int) -> GenerateSpec:
    defaults = {"max_new_tokens": DEFAULT_MAX_TOKENS, "seed": seed}
    if _only_scores(values):  # one token is checked, and isn't generated
        values = values | {"max_tokens": 1, "max_completion_tokens": 1}
        defaults["logprobs"] = 0
    return generate_spec(Prompt("prompt", prompt), values, Completions.fields, defaults)


def _only_scores(values: Json) -> bool:
    wanted = values.get("max_completion_tokens", values.get("max_tokens"))
    return wanted == 0 and values.get("echo", False)


async def _together(
    call: Call, works: Sequence[Callable[[], Coroutine[Any, Any, _Result]]]
) -> list[_Result]:
    """All results in order, or the first error, which ends the others."""
    places = asyncio.Semaphore(max(1, min(MAX_AT_ONCE, call.served.max_waiting // QUEUE_SHARE)))

    async def do(work: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        async with places:
            return await work()

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(do(work)) for work in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _whole(
    results: Sequence[Result], parsed: Sequence[ParsedRequest], info: AnswerInfo, values: Json
) -> Json:
    choices: list[Json] = []
    usage, logprobs = UsageCount(), Logprobs(info.served.text)
    for prompt, result in enumerate(results):
        usage.add(result.usage, prompt)
        for each in result.sequences:
            choice = _choice(len(choices), each, finish_reason(each.finish))
            if "logprobs" in values:
                choice["logprobs"] = logprobs.completion(each.logprobs, Offsets())
            choice |= extensions(each, values)
            if values.get("return_token_ids"):
                choice["prompt_token_ids"] = list(parsed[prompt].given_ids)
            if "prompt_logprobs" in values:
                prompt_logprobs = result.sequences[0].prompt_logprobs
                choice["prompt_logprobs"] = logprobs.prompt(prompt_logprobs)
            choices.append(choice)
    slowest = max((each.timings for each in results), key=lambda timings: timings.total_ms)
    return info.wrap(choices, usage=usage.json(), timings=timings_json(slowest))


def _choice(index: int, chunk: Chunk, reason: str | None) -> Json:
    return {"index": index, "text": chunk.text, "logprobs": None, "finish_reason": reason}


class _Stream(AnswerStream):
    def __init__(self, info: AnswerInfo, values: Json, events: Events) -> None:
        super().__init__(info, values, events)
        self._offsets: dict[int, Offsets] = {}  # by choice
        self._is_plain = not values.get("return_token_ids") and "logprobs" not in values

    async def send(self, prompt: int, parsed: ParsedRequest, chunk: Chunk) -> None:
        """A chunk of one of the prompts."""
        index = prompt * parsed.request.num_sequences + chunk.sequence
        if self._is_plain and chunk.finish is None and not chunk.prompt_logprobs:
            if chunk.text:
                await self._events.send(self._text_events(index).write(chunk.text))
            return
        if chunk.finish is not None:
            self._usage.add(chunk.finish.usage, prompt)
        if (
            chunk.text
            or chunk.logprobs
            or chunk.finish
            or chunk.prompt_logprobs
            or self._values.get("return_token_ids")
        ):
            await self._events.send(self._chunk(index, chunk, parsed))

    def _text_events(self, index: int) -> TextEvents:
        if index not in self._texts:
            choice = _choice(index, Chunk(index, TextEvents.PLACE), None)
            self._texts[index] = TextEvents(self._info, choice, **self._rest)
        return self._texts[index]

    def _chunk(self, index: int, chunk: Chunk, parsed: ParsedRequest) -> bytes:
        values, is_first = self._values, index not in self._offsets
        offsets = self._offsets.setdefault(index, Offsets())
        choice = _choice(index, chunk, finish_reason(chunk.finish)) | extensions(chunk, values)
        if "logprobs" in values:
            choice["logprobs"] = self._logprobs.completion(chunk.logprobs, offsets)
        if is_first and values.get("return_token_ids"):
            choice["prompt_token_ids"] = list(parsed.given_ids)
        if chunk.prompt_logprobs:
            choice["prompt_logprobs"] = self._logprobs.prompt(chunk.prompt_logprobs)
        rest: Json = {}
        if chunk.finish is not None:
            rest["timings"] = timings_json(chunk.finish.timings)
        return self._event(choice, **rest)
