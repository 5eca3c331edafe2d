"""What the users of one process share: which request is next, and when it is over.

Knows: the plan of the load, the clock. Does not know: Locust, gevent, gRPC.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from loadtest.arrivals import arrivals
from loadtest.asking import Ask, Facts
from loadtest.scenarios import make_ask


@dataclass(frozen=True)
class Plan:
    """What the whole crowd does. 0 means: no such limit."""

    scenario: str = "short-chat"
    seed: int = 0
    max_requests: int = 0
    duration_s: float = 0.0
    rate: float = 0.0  # above 0: an open loop
    ramp_s: float = 0.0
    max_new_tokens: int = 0


class Schedule:
    """One of `num_parts` processes. Together they ask what a single one would ask."""

    def __init__(
        self,
        plan: Plan,
        facts: Facts,
        part: int = 0,
        num_parts: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self._facts = facts
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

    def ask(self, index: int) -> Ask:
        plan = self.plan
        cap = plan.max_new_tokens or None
        return make_ask(plan.scenario, plan.seed, index, self._facts, cap)

    def is_over(self, at_s: float | None = None) -> bool:
        """No more requests are made; some may still run."""
        elapsed_s = (self._clock() if at_s is None else at_s) - self._start_s
        return self._exhausted or 0 < self.plan.duration_s <= elapsed_s

    def is_done(self) -> bool:
        return self.is_over() and self.num_running == 0

    def take_arrivals(self) -> Iterator[float] | None:
        """The open loop's starts, on the clock, for the first user that comes; None for others."""
        if self._generator_taken:
            return None
        self._generator_taken = True
        rate = self.plan.rate / self._num_parts
        starts = arrivals(self.plan.seed, self._part, rate, self.plan.ramp_s)
        return (self._start_s + offset_s for offset_s in starts)
