"""`quill serve` with structured output: validity, batch invariance, speed, adversarial load.

    python -m quill.loadtest.bench.backends.quill_structured '{"bundle": …, "options": […]}'

Knows: gRPC, asyncio, jsonschema, the constraints. Does not know: bars, grammars.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from quill.loadtest.bench.backends.quill_server import QuillServer, main
from quill.loadtest.bench.backends.quill_streams import Answer, Client, cancel, gaps, run_client
from quill.loadtest.workload.constraints import SCHEMAS, adversarial_constraints, wanted_schema
from quill.protos import generation_pb2 as pb

NUM_PROBLEMS = 3  # that are shown
TEMPERATURES = (0.0, 0.7, 1.0)  # by seed, in turns
NUM_WATCHED = 192  # tokens of each stream whose gaps are measured
NUM_STORY = 96
NUM_STREAMS = 16  # beside adversarial requests
NUM_BEFORE = 12  # chunks of each stream before an adversarial request
NUM_NEW = 400  # tokens of each stream; then it is replaced
NUM_FOLLOWED = 24  # tokens of an answer to an adversarial constraint
REJECTIONS = ("INVALID_ARGUMENT", "FAILED_PRECONDITION")
STORY = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 60}, "story": {"type": "string"}},
    "required": ["title", "story"],
    "additionalProperties": False,
}


class Validity:
    """Validates answers to one schema. Formats count where jsonschema checks them by itself: date,
    email, IP addresses, UUIDs and some more."""

    def __init__(self, schema: dict[str, Any]) -> None:
        kind = validator_for(schema, default=Draft202012Validator)
        self._validator = kind(schema, format_checker=kind.FORMAT_CHECKER)

    def problem(self, text: str) -> str:
        """Empty: the text is valid."""
        try:
            value = json.loads(text)
        except ValueError as error:
            return f"no JSON: {error}"
        first = next(iter(self._validator.iter_errors(value)), None)
        return "" if first is None else str(first.message)


async def send_all(
    client: Client, requests: Sequence[pb.GenerateRequest], num_users: int
) -> list[Answer]:
    """Each user sends the next request when it has its answer."""
    answers = [Answer() for _ in requests]
    waiting = iter(zip(requests, answers, strict=True))

    async def user(mine: Iterable[tuple[pb.GenerateRequest, Answer]]) -> None:
        for request, answer in mine:
            await client.send(request, answer)

    await asyncio.gather(*(user(waiting) for _ in range(num_users)))
    return answers


async def send_checked(
    client: Client, requests: Sequence[pb.GenerateRequest], num_users: int
) -> list[Answer]:
    return [answer.check() for answer in await send_all(client, requests, num_users)]


def schema_request(name: str, seed: int, max_new_tokens: int) -> pb.GenerateRequest:
    wanted = wanted_schema(name)
    question = pb.Message(role="user", content=f"Give me {wanted.what}.")
    return pb.GenerateRequest(
        messages=pb.Conversation(messages=[question]),
        constraint=wanted.constraint,
        max_new_tokens=max_new_tokens,
        temperature=TEMPERATURES[seed % len(TEMPERATURES)],
        seed=seed,
    )


def story_request(seed: int) -> pb.GenerateRequest:
    question = "Tell me a long story about a lighthouse, as JSON."
    return pb.GenerateRequest(
        messages=pb.Conversation(messages=[pb.Message(role="user", content=question)]),
        constraint=pb.Constraint(json_schema=json.dumps(STORY)),
        max_new_tokens=NUM_STORY,
        min_new_tokens=NUM_STORY,
        temperature=0.7,
        seed=seed,
    )


def unconstrained(request: pb.GenerateRequest, num_tokens: int) -> pb.GenerateRequest:
    """The same without its constraint, for exactly so many tokens."""
    free = pb.GenerateRequest()
    free.CopyFrom(request)
    free.ClearField("constraint")
    free.ClearField("min_new_tokens")
    free.ignore_eos, free.max_new_tokens = True, num_tokens
    return free


def validate(names: Sequence[str], answers: Sequence[Answer]) -> dict[str, Any]:
    """Counts the valid answers among those that ended by themselves."""
    validity = {name: Validity(schema) for name, schema in SCHEMAS.items()}
    num_ended, num_valid, problems = 0, 0, list[str]()
    for name, answer in zip(names, answers, strict=True):
        if answer.status != "OK":
            problems.append(f"{name}: {answer.status}: {answer.message}")
        if answer.finish != pb.FINISH_REASON_EOS:
            continue
        num_ended += 1
        problem = validity[name].problem(answer.text)
        num_valid += not problem
        problems += [f"{name}: {problem}: {answer.text[:80]}"] if problem else []
    statuses = dict(Counter(each.status for each in answers))
    counts = {"num_ended": num_ended, "num_valid": num_valid}
    return {"statuses": statuses, **counts, "problems": problems[:NUM_PROBLEMS]}


class QuillStructured(QuillServer):
    def answers(
        self, num_seeds: int, num_users: int, num_alone: int, max_new_tokens: int = 256
    ) -> dict[str, Any]:
        """Validates answers to all schemas, and sends some requests again, alone."""
        keys = [(name, seed) for seed in range(num_seeds) for name in SCHEMAS]
        requests = [schema_request(name, seed, max_new_tokens) for name, seed in keys]
        stride = max(1, len(keys) // num_alone) if num_alone else len(keys)
        places = range(0, len(keys), stride)[:num_alone]  # some of every schema

        async def measure(client: Client) -> tuple[list[Answer], list[Answer]]:
            batched = await send_all(client, requests, num_users)
            return batched, [await client.send(requests[place]) for place in places]

        batched, alone = run_client(self.address, measure)
        pairs = zip(places, alone, strict=True)
        different = [keys[place] for place, answer in pairs if answer.key != batched[place].key]
        found = validate([name for name, _ in keys], batched)
        texts = [f"{name}, seed {seed}: other tokens alone" for name, seed in different]
        found["problems"] += texts[:NUM_PROBLEMS]
        num_equal = len(alone) - len(different)
        return found | {"num": len(keys), "num_alone": len(alone), "num_equal": num_equal}

    def speed(self, num_users: int, max_new_tokens: int = 96) -> dict[str, Any]:
        """Pairs of unconstrained and constrained: tokens a second, and p95 gaps of streams beside.

        The unconstrained requests have the same prompts and as many tokens.
        """
        requests = [
            schema_request(name, seed, max_new_tokens) for seed in range(2) for name in SCHEMAS
        ]
        stories = [story_request(seed) for seed in range(num_users)]

        async def measure(client: Client) -> dict[str, list[float]]:
            free = await _as_long(client, requests)
            free_stories = await _as_long(client, stories)
            pairs = {"schemas": (free, requests), "story": (free_stories, stories)}
            found = {
                name: [await _rate(client, each, num_users) for each in pair]
                for name, pair in pairs.items()
            }
            gaps = [await _watched_gap(client, num_users // 2, each) for each in pairs["schemas"]]
            return found | {"gap": gaps}

        return run_client(self.address, measure)

    def adversarial(self, num_streams: int = NUM_STREAMS) -> dict[str, Any]:
        """Adversarial constraints beside streams: how long each takes, and the streams' gaps.

        Gaps are in steps, which are medians of gaps before the first of them.
        """
        return run_client(self.address, lambda client: AdversarialLoad(client, num_streams).run())


async def _as_long(
    client: Client, requests: Sequence[pb.GenerateRequest]
) -> list[pb.GenerateRequest]:
    """Unconstrained requests, each as long as the constrained answer: a batch that shrinks early
    is slower."""
    answers = await send_checked(client, requests, len(requests))
    pairs = zip(requests, answers, strict=True)
    return [unconstrained(request, len(answer.token_ids)) for request, answer in pairs]


async def _rate(client: Client, requests: Sequence[pb.GenerateRequest], num_users: int) -> float:
    begin_s = time.perf_counter()
    answers = await send_checked(client, requests, num_users)
    seconds = time.perf_counter() - begin_s
    return sum(len(answer.token_ids) for answer in answers) / seconds


async def _watched_gap(
    client: Client, num_each: int, others: Sequence[pb.GenerateRequest]
) -> float:
    """The p95 gap of unconstrained streams, while as many users send the others again and again.

    Streams that come in one chunk each have no gap; others are sent then.
    """

    async def repeat() -> None:
        while True:
            await send_checked(client, others, num_each)

    watched = [unconstrained(story_request(seed), NUM_WATCHED) for seed in range(num_each)]
    beside = asyncio.create_task(repeat())
    found: list[float] = []
    while not found:
        answers = await send_checked(client, watched, num_each)
        found = [gap for answer in answers for gap in gaps(answer.times_s)]
    await cancel([beside])
    return float(np.percentile(found, 95))


class AdversarialLoad:
    def __init__(self, client: Client, num_streams: int) -> None:
        self._client, self._num_streams = client, num_streams
        self._answers: list[Answer] = []
        self._found: dict[str, dict[str, Any]] = {
            "rejected_s": {}, "first_token_s": {}, "failed": {}, "extra_steps": {}
        }  # fmt: skip

    async def run(self) -> dict[str, Any]:
        tasks = [asyncio.create_task(self._stream(seed)) for seed in range(self._num_streams)]
        try:
            await self._chunks(4)
            step_s = float(np.median(await self._gaps_during(self._chunks(4 * NUM_BEFORE))))
            for name, constraint in adversarial_constraints().items():
                before = await self._gaps_during(self._chunks(NUM_BEFORE))
                during = await self._gaps_during(self._send(name, constraint))
                self._found["extra_steps"][name] = (max(during) - max(before)) / step_s
        finally:
            await cancel(tasks)
        return self._found | {"step_s": step_s}

    async def _send(self, name: str, constraint: pb.Constraint) -> None:
        begin_s = time.perf_counter()
        request = pb.GenerateRequest(
            prompt="Go on:", constraint=constraint, max_new_tokens=NUM_FOLLOWED
        )
        answer = await self._client.send(request)
        if answer.times_s:
            self._found["first_token_s"][name] = answer.times_s[0] - begin_s
        elif answer.status in REJECTIONS:
            self._found["rejected_s"][name] = time.perf_counter() - begin_s
        else:
            self._found["failed"][name] = f"{answer.status}: {answer.message}"
        await self._chunks(2)  # the gaps that began meanwhile end

    async def _stream(self, seed: int) -> None:
        request = pb.GenerateRequest(
            prompt=f"Story number {seed}. The lighthouse keeper",
            max_new_tokens=NUM_NEW,
            ignore_eos=True,
            temperature=0.8,
            seed=seed,
        )
        while True:
            self._answers.append(Answer())
            (await self._client.send(request, self._answers[-1])).check()

    async def _chunks(self, num_each: int) -> None:
        """Until all streams together have received so many more for each."""

        def num_chunks() -> int:
            return sum(len(answer.times_s) for answer in self._answers)

        wanted = num_chunks() + num_each * self._num_streams
        await self._client.until(lambda: num_chunks() >= wanted)

    async def _gaps_during(self, wait: Awaitable[None]) -> list[float]:
        begin_s = time.perf_counter()
        await wait
        end_s = time.perf_counter()
        return [gap for answer in self._answers for gap in gaps(answer.times_s, begin_s, end_s)]


if __name__ == "__main__":
    main(QuillStructured)
