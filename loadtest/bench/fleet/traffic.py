"""What a simulated fleet is asked: many applications, each with a system prompt of its own.

Knows: chance, lengths. Does not know: servers, time that passes.
Some applications are asked far more often than others (Zipf's law); requests come as they please
(Poisson). The same seed gives the same calls.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

SYSTEM = (64, 256)  # tokens of a system prompt, from and to
OWN = (8, 32)  # of what comes after it
ANSWER = (8, 24)
_APART = 1_000_000  # so that no two prompts have a token in common by chance


@dataclass(frozen=True)
class Call:
    number: int
    at_s: float
    key: bytes  # what it begins with
    prompt_ids: tuple[int, ...]
    num_new: int


class Traffic:
    def __init__(self, seed: int, rate: float, num_apps: int, skew: float = 1.0) -> None:
        """`rate`: calls a second. `skew` 0: all applications are asked equally often."""
        self._chance = random.Random(f"{seed}/traffic")
        self._rate = rate
        lengths = random.Random(f"{seed}/apps")
        self._systems = [
            tuple(range(app * _APART, app * _APART + lengths.randint(*SYSTEM)))
            for app in range(num_apps)
        ]
        weights = ((app + 1) ** -skew for app in range(num_apps))
        self._weights = list(itertools.accumulate(weights))

    def calls(self, duration_s: float) -> Iterator[Call]:
        chance, at_s = self._chance, 0.0
        for number in itertools.count():
            at_s += chance.expovariate(self._rate)
            if at_s >= duration_s:
                return
            (app,) = chance.choices(range(len(self._systems)), cum_weights=self._weights)
            first = -(number + 1) * _APART
            own = tuple(range(first, first + chance.randint(*OWN)))
            prompt_ids = (*self._systems[app], *own)
            yield Call(number, at_s, b"%d" % app, prompt_ids, chance.randint(*ANSWER))
