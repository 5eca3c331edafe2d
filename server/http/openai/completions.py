"""`/v1/completions`: texts that are continued, in OpenAI's older shape, several at once.

Knows: its JSON, generation.proto. Does not know: how an answer is made.

A list of prompts is one call and so many requests. All have the call's seed, and are answered as if
each had been sent by itself; choices come in the order of the prompts.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from quill.protos import generation_pb2 as pb
from quill.server.errors import InvalidFieldError, RequestError
from quill.server.http.openai.generations import (
    COMMON,
    Facts,
    Tally,
    beside,
    finish_reason,
    includes_usage,
    option_message,
    timings_json,
)
from quill.server.http.openai.logprobs import CompletionLogprobs, prompt_logprobs
from quill.server.http.openai.models import check_model
from quill.server.http.openai.prompts import PROMPTS, Prompt
from quill.server.http.wire.exchange import Events, Exchange
from quill.server.http.wire.route import Route
from quill.server.protocol.requests import ParsedRequest
from quill.server.service.call import MAX_INLINE_TOKENS, Call
from quill.server.service.generation_options import REFUSED
from quill.server.service.json_fields import BOOLEAN, INTEGER, Field, Json, Refused
from quill.server.service.origin import Origin

DEFAULT_MAX_TOKENS = 16  # OpenAI's
_Result = TypeVar("_Result")

# So many of a call's requests at once, and no more than this share of the queue.
MAX_AT_ONCE = 32
QUEUE_SHARE = 4


class Completions(Route):
    path = "/v1/completions"
    says = "continuations of texts"
    fields = (
        Field("prompt", PROMPTS, "a text or token ids, or a list of such", is_required=True),
        *COMMON,
        Field("logprobs", INTEGER, "log-probabilities, and of so many others", "logprobs"),
        Field("echo", BOOLEAN, "the prompt before the answer. With max_tokens 0: rates it", "echo"),
        Field("best_of", INTEGER, "the same as n; more isn't supported"),
    )
    refused = (*REFUSED, Refused("suffix", ("",), "This model only continues. Leave it out"))

    def as_written(self, error: RequestError, values: Json) -> RequestError:
        if isinstance(error, InvalidFieldError) and error.field == "prompt_ids":
            return InvalidFieldError("prompt", error.reason)
        return super().as_written(error, values)

    async def answer(self, values: Json, origin: Origin, exchange: Exchange) -> None:
        async with self._service.call(origin) as call:
            check_model(values, call.served)
            options = _options(values)
            parsed = await _read(call, values, options)
            facts = Facts(
                id=f"cmpl-{origin.request_id}",
                kind="text_completion",
                served=call.served,
                seed=options.seed,
            )
            if values.get("stream"):
                async with exchange.events() as events:
                    await _stream(call, parsed, _Stream(facts, values, events))
            else:
                works = [partial(call.generate, each) for each in parsed]
                responses = await _together(call, works)
                whole = partial(_whole, responses, parsed, facts, values)
                if sum(map(_num_tokens, responses)) > MAX_INLINE_TOKENS:
                    await exchange.answer_long(whole)
                else:
                    await exchange.answer_json(whole())


async def _read(call: Call, values: Json, options: pb.GenerateRequest) -> list[ParsedRequest]:
    """All are checked before the first one begins: a call is refused as a whole."""
    read = call.read_only if _only_rates(values) else call.read
    parsed = []
    for prompt in values["prompt"]:
        parsed.append(await read(_request(options, prompt)))
        await asyncio.sleep(0)  # whoever else has something to do comes between
    return parsed


def _options(values: Json) -> pb.GenerateRequest:
    if values.get("best_of", values.get("n", 1)) > values.get("n", 1):
        raise InvalidFieldError("best_of", "is above n, which isn't supported here. Give num_beams")
    options = option_message(values, DEFAULT_MAX_TOKENS, Completions.fields)
    if _only_rates(values):
        options.max_new_tokens = 1  # is checked, and isn't made
        options.logprobs = values.get("logprobs", 0)
    return options


def _only_rates(values: Json) -> bool:
    wanted = values.get("max_completion_tokens", values.get("max_tokens"))
    return wanted == 0 and values.get("echo", False)


def _request(options: pb.GenerateRequest, prompt: Prompt) -> pb.GenerateRequest:
    message = pb.GenerateRequest()
    message.CopyFrom(options)
    if isinstance(prompt, str):
        message.prompt = prompt
    else:
        message.prompt_ids.ids.extend(prompt)
    return message


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
    responses: Sequence[pb.GenerateResponse],
    parsed: Sequence[ParsedRequest],
    facts: Facts,
    values: Json,
) -> Json:
    choices: list[Json] = []
    tally = Tally()
    for prompt, response in enumerate(responses):
        tally.note(response.usage, prompt)
        for each in response.sequences:
            logprobs = CompletionLogprobs().add(each.logprobs) if "logprobs" in values else None
            choice = _choice(len(choices), each.text, logprobs, finish_reason(each))
            choice |= beside(each, values)
            if values.get("return_token_ids"):
                choice["prompt_token_ids"] = list(parsed[prompt].given_ids)
            if "prompt_logprobs" in values:
                choice["prompt_logprobs"] = prompt_logprobs(response.prompt_logprobs)
            choices.append(choice)
    slowest = max((each.timings for each in responses), key=lambda timings: timings.total_ms)
    return facts.wrap(choices, usage=tally.json(), timings=timings_json(slowest))


def _num_tokens(response: pb.GenerateResponse) -> int:
    return response.usage.prompt_tokens + response.usage.generated_tokens


def _choice(index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


async def _stream(call: Call, parsed: Sequence[ParsedRequest], stream: "_Stream") -> None:
    works = [
        partial(call.generate_stream, each, stream.sender(number, each))
        for number, each in enumerate(parsed)
    ]
    await _together(call, works)
    await stream.end()


class _Stream:
    def __init__(self, facts: Facts, values: Json, events: Events) -> None:
        self._facts = facts
        self._values = values
        self._events = events
        self._tally = Tally()
        self._logprobs: dict[int, CompletionLogprobs] = {}  # by choice

    def sender(
        self, prompt: int, parsed: ParsedRequest
    ) -> Callable[[pb.GenerateChunk], Coroutine[Any, Any, None]]:
        """What the chunks of one of the prompts are given to."""

        async def send(chunk: pb.GenerateChunk) -> None:
            index = prompt * parsed.request.num_sequences + chunk.sequence
            if chunk.finish_reason:
                self._tally.note(chunk.usage, prompt)
            wants_ids = self._values.get("return_token_ids")
            says = chunk.text or chunk.logprobs or chunk.finish_reason or chunk.prompt_logprobs
            if says or wants_ids:
                await self._tell(index, chunk, parsed)

        return send

    async def _tell(self, index: int, chunk: pb.GenerateChunk, parsed: ParsedRequest) -> None:
        values, is_first = self._values, index not in self._logprobs
        logprobs = self._logprobs.setdefault(index, CompletionLogprobs())
        rated = logprobs.add(chunk.logprobs) if "logprobs" in values else None
        choice = _choice(index, chunk.text, rated, finish_reason(chunk)) | beside(chunk, values)
        if is_first and values.get("return_token_ids"):
            choice["prompt_token_ids"] = list(parsed.given_ids)
        if chunk.prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(chunk.prompt_logprobs)
        rest: Json = {}
        if chunk.finish_reason:
            rest["timings"] = timings_json(chunk.timings)
        if includes_usage(values):
            rest["usage"] = None
        await self._events.send(self._facts.wrap([choice], **rest))

    async def end(self) -> None:
        if includes_usage(self._values):
            await self._events.send(self._facts.wrap([], usage=self._tally.json()))
        await self._events.end()
