"""What the users of one process share: which request is next, and when it is over.

Knows: the plan of the load, the clock. Does not know: Locust, gevent, gRPC.
"""

import itertools
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from quill.loadtest.workload.arrivals import arrivals
from quill.loadtest.workload.ask import Ask, Facts
from quill.loadtest.workload.scenarios import make_ask


def _option(default: Any, name: str, text: str) -> Any:
    return field(default=default, metadata={"option": name, "help": text})


@dataclass(frozen=True)
class Plan:
    """What the whole crowd does. 0 means: no such limit. Each field is an option of Locust's."""

    scenario: str = _option("short-chat", "scenario", "what is asked")
    seed: int = _option(0, "seed", "the same seed asks the same requests; 0: a new one each time")
    max_requests: int = _option(0, "requests", "end after so many; 0: no limit")
    duration_s: float = _option(0.0, "duration", "ask for so many seconds; 0: no limit")
    rate: float = _option(0.0, "rate", "requests a second, open loop; 0: closed")
    ramp_s: float = _option(0.0, "ramp", "seconds until the rate is reached (open loop)")
    max_new_tokens: int = _option(0, "max-new-tokens", "shorten all answers; 0: as they are")

    def arguments(self) -> list[str]:
        """For Locust's command line."""
        pairs = ((each.metadata["option"], getattr(self, each.name)) for each in fields(self))
        return [word for option, value in pairs for word in (f"--{option}", str(value))]

    @classmethod
    def from_options(cls, options: object) -> "Plan":
        """What Locust made of them, on its command line or its page."""
        found = {each.name: each.metadata["option"].replace("-", "_") for each in fields(cls)}
        return cls(**{name: getattr(options, option) for name, option in found.items()})

    def with_seed(self) -> "Plan":
        """What an earlier run asked may be in the server's prefix cache: so a new seed."""
        return self if self.seed else replace(self, seed=new_seed())


def new_seed() -> int:
    return 1 + secrets.randbelow(10**9)


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
