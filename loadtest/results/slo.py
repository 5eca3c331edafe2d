"""A service level objective, and the search for the highest rate that meets it.

Knows: records, limits. Does not know: how requests are made.
A request is served well if it ended with an expected status and met all limits. A rate is carried
if at least `SHARE` of its requests are served well.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quill.loadtest.errors import OptionError
from quill.loadtest.workload.records import RequestRecord

SHARE = 0.95
_FINE_ENOUGH = 1.1  # the search ends when the lowest failing rate is this near to the highest good
_MAX_RATE = 10_000.0
_GIVE_UP = 16  # times below the first rate
_UNITS = {"ms": 1.0, "s": 1000.0, "m": 60_000.0}

# The slowest of each kind; None if the request had nothing of it.
_MEASURES: Mapping[str, Callable[[RequestRecord], float | None]] = {
    "ttft": lambda record: record.first_token_ms,
    "gap": lambda record: max(record.gaps_ms, default=None),
    "tpot": lambda record: record.per_token_ms,
    "total": lambda record: record.total_ms,
}


@dataclass(frozen=True)
class Slo:
    limits_ms: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """'ttft=500ms,gap=100ms'."""
        limits = {}
        for part in text.split(","):
            name, _, limit = part.strip().partition("=")
            if name not in _MEASURES:
                names = ", ".join(_MEASURES)
                raise OptionError(f"{part!r} isn't part of a service level; there are {names}")
            limits[name] = parse_duration_ms(limit)
        return cls(limits)

    def __str__(self) -> str:
        return ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in self.limits_ms.items())

    def is_met(self, record: RequestRecord) -> bool:
        if not record.ok:
            return False
        measured = ((_MEASURES[name](record), limit) for name, limit in self.limits_ms.items())
        return all(value is None or value <= limit for value, limit in measured)

    def share(self, records: Sequence[RequestRecord]) -> float:
        """Of requests served well."""
        return sum(map(self.is_met, records)) / len(records) if records else 0.0


class RateTrial(NamedTuple):
    """One step of the search."""

    rate: float
    share: float
    goodput: float  # requests served well, a second
    num_requests: int = 0

    @property
    def is_carried(self) -> bool:
        return self.share >= SHARE

    @property
    def share_range(self) -> tuple[float, float]:
        """Where the share lies that endless requests would have, in 95 of 100 cases (Wilson)."""
        n, z = max(1, self.num_requests), 1.96
        middle = (self.share + z * z / (2 * n)) / (1 + z * z / n)
        spread = self.share * (1 - self.share) / n + z * z / (4 * n * n)
        reach = z * math.sqrt(spread) / (1 + z * z / n)
        return max(0.0, middle - reach), min(1.0, middle + reach)


def next_rate(trials: Sequence[RateTrial], first: float) -> float | None:
    """Doubles (or halves) until the answer lies between two rates, then halves the distance."""
    if not trials:
        return first
    good = max((step.rate for step in trials if step.is_carried), default=0.0)
    bad = min((step.rate for step in trials if not step.is_carried), default=_MAX_RATE * 2)
    if bad > _MAX_RATE:
        return good * 2 if good < _MAX_RATE else None
    if good == 0:
        return bad / 2 if bad > first / _GIVE_UP else None
    # Chance may carry a rate above one that failed: then there is nothing between them.
    return None if bad <= good * _FINE_ENOUGH else (good + bad) / 2


def best(trials: Sequence[RateTrial]) -> RateTrial | None:
    """The highest rate that was carried."""
    return max((step for step in trials if step.is_carried), default=None)


def parse_duration_ms(text: str) -> float:
    """'500ms', '2s', '1.5m'."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m)", text.strip())
    if not found or float(found[1]) == 0:
        raise OptionError(f"{text!r} isn't a duration above 0, such as 500ms, 30s or 2m")
    return float(found[1]) * _UNITS[found[2]]
