"""When an open loop's requests start: a Poisson process, whatever the server makes of them.

Knows: rates, chance. Does not know: clocks, requests.
"""

import math
import random
from collections.abc import Iterator


def arrivals(seed: int, part: int, rate: float, ramp_s: float = 0.0) -> Iterator[float]:
    """Seconds from the start, without end. The rate grows evenly from 0 during the ramp.

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
    """The time by which so many arrivals are due: rate·t²/(2·ramp) in the ramp, then straight."""
    in_ramp = rate * ramp_s / 2
    if expected < in_ramp:
        return math.sqrt(2 * ramp_s * expected / rate)
    return ramp_s + (expected - in_ramp) / rate
