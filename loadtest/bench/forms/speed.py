"""What forms cost: tokens a second of rows that keep to them, and the gaps of those beside.

Knows: which crowds to compare. Does not know: why one is slower.

Whoever keeps to a form is compared with others who get the same prompts and as many tokens, and may
say what they like.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quill.loadtest.bench.forms.answers import schema_request
from quill.loadtest.bench.forms.crowd import Heard, Server, as_free, ask_all
from quill.loadtest.errors import LoadtestError
from quill.loadtest.workload.forms import SCHEMAS
from quill.protos import generation_pb2 as pb

NUM_WATCHED = 192  # tokens of each stream whose gaps are looked at
NUM_STORY = 96
MAX_NEW_TOKENS = 96
STORY = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 60}, "story": {"type": "string"}},
    "required": ["title", "story"],
    "additionalProperties": False,
}


@dataclass
class Costs:
    """All rounds, free and with forms: tokens a second, and 95th percentiles of gaps."""

    schemas: list[tuple[float, float]] = field(default_factory=list)
    story: list[tuple[float, float]] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)


async def measure(server: Server, num_rows: int, costs: Costs) -> None:
    """One round. The lengths are those of the answers that keep to their forms."""
    requests = [schema_request(name, seed, MAX_NEW_TOKENS) for seed in range(2) for name in SCHEMAS]
    free = await _as_long(server, requests)
    costs.schemas.append(await _rates(server, free, requests, num_rows))
    stories = [_story(seed) for seed in range(num_rows)]
    costs.story.append(await _rates(server, await _as_long(server, stories), stories, num_rows))
    without, beside = [
        await _watched_gaps(server, num_rows // 2, some) for some in (free, requests)
    ]
    costs.gaps.append((without, beside))


def _story(seed: int) -> pb.GenerateRequest:
    asked = pb.Message(role="user", content="Tell me a long story about a lighthouse, as JSON.")
    return pb.GenerateRequest(
        messages=pb.Conversation(messages=[asked]),
        constraint=pb.Constraint(json_schema=json.dumps(STORY)),
        max_new_tokens=NUM_STORY,
        min_new_tokens=NUM_STORY,
        temperature=0.7,
        seed=seed,
    )


async def _as_long(
    server: Server, requests: Sequence[pb.GenerateRequest]
) -> list[pb.GenerateRequest]:
    """Free ones, each as long as the answer to the one with a form: some of these end early, and
    rows that are fewer are slower."""
    formed = await ask_all(server, requests, len(requests))
    _check(formed)
    return [
        as_free(request, len(heard.token_ids))
        for request, heard in zip(requests, formed, strict=True)
    ]


async def _rates(
    server: Server,
    free: Sequence[pb.GenerateRequest],
    formed: Sequence[pb.GenerateRequest],
    num_rows: int,
) -> tuple[float, float]:
    return await _rate(server, free, num_rows), await _rate(server, formed, num_rows)


async def _rate(server: Server, requests: Sequence[pb.GenerateRequest], num_rows: int) -> float:
    begin_s = time.perf_counter()
    answers = await ask_all(server, requests, num_rows)
    seconds = time.perf_counter() - begin_s
    _check(answers)
    return sum(len(heard.token_ids) for heard in answers) / seconds


async def _watched_gaps(
    server: Server, num_each: int, others: Sequence[pb.GenerateRequest]
) -> float:
    """The 95th percentile of free streams' gaps, while as many others ask again and again."""
    watched = [as_free(_story(seed), NUM_WATCHED) for seed in range(num_each)]
    beside = asyncio.create_task(_forever(server, others, num_each))
    streams = await ask_all(server, watched, num_each)
    beside.cancel()
    await asyncio.gather(beside, return_exceptions=True)
    _check(streams)
    return float(np.percentile([gap for heard in streams for gap in heard.gaps()], 95))


async def _forever(server: Server, requests: Sequence[pb.GenerateRequest], num_users: int) -> None:
    while True:
        _check(await ask_all(server, requests, num_users))


def _check(answers: Sequence[Heard]) -> None:
    for heard in answers:
        if heard.status != "OK":
            raise LoadtestError(f"an answer failed with {heard.status}: {heard.message}")
