"""The plan of a load, and which request each process sends next.

Knows: the plan, Poisson arrivals, the clock. Does not know: Locust, gevent, gRPC.
"""

import itertools
import math
import random
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from quill.loadtest.workload.request import LoadRequest, ModelInfo
from quill.loadtest.workload.scenarios import make_request

MIN_TIMEOUT_S = 0.1  # of a request that is sent too late
PROGRESS = "PROGRESS "  # begins the lines in which a Locust process reports progress as JSON


def _option(default: Any, name: str, text: str) -> Any:
    return field(default=default, metadata={"option": name, "help": text})


@dataclass(frozen=True)
class Plan:
    """The whole load. 0 means: no such limit. Each field is an option of Locust's command line."""

    scenario: str = _option("short-chat", "scenario", "kind of requests")
    seed: int = _option(0, "seed", "the same seed sends the same requests; 0: a new one each time")
    max_requests: int = _option(0, "requests", "end after so many; 0: no limit")
    duration_s: float = _option(0.0, "duration", "send requests for so many seconds; 0: no limit")
    rate: float = _option(0.0, "rate", "requests a second, open loop; 0: closed")
    ramp_s: float = _option(0.0, "ramp", "seconds until the rate is reached (open loop)")
    max_new_tokens: int = _option(0, "max-new-tokens", "limit all answers; 0: no limit")
    drain_s: float = _option(0.0, "drain", "cut requests off so long after --duration; 0: never")

    def arguments(self) -> list[str]:
        """For Locust's command line."""
        pairs = ((each.metadata["option"], getattr(self, each.name)) for each in fields(self))
        return [word for option, value in pairs for word in (f"--{option}", str(value))]

    @classmethod
    def from_options(cls, options: object) -> "Plan":
        """From Locust's command line or its page."""
        found = {each.name: each.metadata["option"].replace("-", "_") for each in fields(cls)}
        return cls(**{name: getattr(options, option) for name, option in found.items()})

    def with_seed(self) -> "Plan":
        """A new seed: the requests of an earlier run may be in the server's prefix cache."""
        return self if self.seed else replace(self, seed=new_seed())


def new_seed() -> int:
    return 1 + secrets.randbelow(10**9)


class Schedule:
    """One of `num_parts` processes. Together they send what a single process would send."""

    def __init__(
        self,
        plan: Plan,
        info: ModelInfo,
        part: int = 0,
        num_parts: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self._info = info
        self._part = part
        self._num_parts = num_parts
        self._clock = clock
        self._start_s = clock()
        self._indices = itertools.count(part, num_parts)
        self._exhausted = False
        self._generator_taken = False
        self.num_running = 0

    def next_index(self, intended_s: float | None = None) -> int | None:
        """The number of the request that is due now, or was due then. None: there are no more."""
        if self.is_over(intended_s):
            return None
        index = next(self._indices)
        if self.plan.max_requests and index >= self.plan.max_requests:
            self._exhausted = True
            return None
        return index

    def request(self, index: int) -> LoadRequest:
        plan = self.plan
        cap = plan.max_new_tokens or None
        load = make_request(plan.scenario, plan.seed, index, self._info, cap)
        if not plan.drain_s:
            return load
        left_s = self._start_s + plan.duration_s + plan.drain_s - self._clock()
        return replace(load, timeout_s=min(load.timeout_s, max(left_s, MIN_TIMEOUT_S)))

    def is_over(self, at_s: float | None = None) -> bool:
        """No more requests are sent; some may still run."""
        elapsed_s = (self._clock() if at_s is None else at_s) - self._start_s
        return self._exhausted or 0 < self.plan.duration_s <= elapsed_s

    def is_done(self) -> bool:
        return self.is_over() and self.num_running == 0

    def take_arrivals(self) -> Iterator[float] | None:
        """The open loop's starts, on the clock, for the first user only."""
        if self._generator_taken:
            return None
        self._generator_taken = True
        rate = self.plan.rate / self._num_parts
        starts = arrivals(self.plan.seed, self._part, rate, self.plan.ramp_s)
        return (self._start_s + offset_s for offset_s in starts)


def arrivals(seed: int, part: int, rate: float, ramp_s: float = 0.0) -> Iterator[float]:
    """A Poisson process: seconds from the start, without end. The rate grows linearly in the ramp.

    `part`: which of several independent processes this is; together they are one whose rate is
    the sum of theirs.
    """
    assert rate > 0, rate
    chance = random.Random(f"{seed}/arrivals/{part}")
    expected = 0.0  # how many arrivals are due by now, on average
    while True:
        expected += chance.expovariate(1.0)
        yield _when(expected, rate, ramp_s)


def _when(expected: float, rate: float, ramp_s: float) -> float:
    """The time by which so many arrivals are due: rate·t²/(2·ramp) in the ramp, then linear."""
    in_ramp = rate * ramp_s / 2
    if expected < in_ramp:
        return math.sqrt(2 * ramp_s * expected / rate)
    return ramp_s + (expected - in_ramp) / rate
