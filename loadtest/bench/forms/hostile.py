"""Hostile forms among people who read their answers: do these notice?

Knows: the hostile forms, the clock. Does not know: what a server does about them.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quill.loadtest.bench.forms.crowd import MAX_WAIT_S, Heard, Server, ask
from quill.loadtest.errors import LoadtestError
from quill.loadtest.workload.hostile_forms import hostile_forms
from quill.protos import generation_pb2 as pb

NUM_STREAMS = 16
NUM_CALM = 48  # messages of a stream before anything happens
NUM_BEFORE = 12  # and before each form
NUM_NEW = 400  # of each stream; then it begins again
NUM_FOLLOWED = 24  # tokens of an answer to a hostile form
REFUSALS = ("INVALID_ARGUMENT", "FAILED_PRECONDITION")
_LOOK_S = 0.01


@dataclass
class Siege:
    """What came of it. Gaps are in steps: in medians of those before."""

    refused_s: dict[str, float] = field(default_factory=dict)
    followed_s: dict[str, float] = field(default_factory=dict)  # until its first token
    failed: dict[str, str] = field(default_factory=dict)
    step_s: float = 0.0
    calm: dict[str, float] = field(default_factory=dict)  # the longest gap just before each
    longest: dict[str, float] = field(default_factory=dict)  # while each was dealt with

    @property
    def moved(self) -> dict[str, float]:
        """By how many steps more: a machine that others use has long gaps by itself."""
        return {name: gap - self.calm[name] for name, gap in self.longest.items()}

    @property
    def slowest_s(self) -> float:
        return max((*self.refused_s.values(), *self.followed_s.values()))


async def besiege(server: Server, num_streams: int = NUM_STREAMS) -> Siege:
    streams: list[Heard] = []
    tasks = [asyncio.create_task(_read(server, i, streams)) for i in range(num_streams)]
    try:
        await _messages(streams, 4 * num_streams)
        begin_s = time.perf_counter()
        await _messages(streams, NUM_CALM * num_streams)
        calm = _gaps(streams, begin_s, time.perf_counter())
        siege = Siege(step_s=float(np.median(calm)))
        for name, form in hostile_forms().items():
            await _attack(server, name, form, streams, siege)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return siege


async def _attack(
    server: Server,
    name: str,
    form: pb.Constraint,
    streams: Sequence[Heard],
    siege: Siege,
) -> None:
    begin_s = time.perf_counter()
    await _messages(streams, NUM_BEFORE * NUM_STREAMS)
    siege.calm[name] = max(_gaps(streams, begin_s, time.perf_counter())) / siege.step_s
    begin_s = time.perf_counter()
    request = pb.GenerateRequest(prompt="Go on:", constraint=form, max_new_tokens=NUM_FOLLOWED)
    heard = await ask(server, request)
    ended_s = time.perf_counter()
    if heard.times_s:
        siege.followed_s[name] = heard.times_s[0] - begin_s
    elif heard.status in REFUSALS:
        siege.refused_s[name] = ended_s - begin_s
    else:
        siege.failed[name] = f"{heard.status}: {heard.message}"
    await _messages(streams, 2 * NUM_STREAMS)  # gaps that began meanwhile end
    siege.longest[name] = max(_gaps(streams, begin_s, time.perf_counter())) / siege.step_s


async def _read(server: Server, seed: int, streams: list[Heard]) -> None:
    while True:
        streams.append(Heard())
        heard = await ask(server, _free(seed), streams[-1])
        if heard.status != "OK":
            raise LoadtestError(f"a stream beside failed with {heard.status}: {heard.message}")


def _free(seed: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt=f"Story number {seed}. The lighthouse keeper",
        max_new_tokens=NUM_NEW,
        ignore_eos=True,
        temperature=0.8,
        seed=seed,
    )


async def _messages(streams: Sequence[Heard], num: int) -> None:
    """Until all streams together have had so many more."""

    def num_heard() -> int:
        return sum(len(heard.times_s) for heard in streams)

    wanted = num_heard() + num
    async with asyncio.timeout(MAX_WAIT_S):
        while num_heard() < wanted:
            await asyncio.sleep(_LOOK_S)


def _gaps(streams: Sequence[Heard], begin_s: float, end_s: float) -> list[float]:
    return [gap for heard in streams for gap in heard.gaps(begin_s, end_s)]
