"""What a simulated fleet was good for.

Knows: calls that have ended, replicas' loads. Does not know: how they came about, pictures.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from quill.loadtest.bench.fleet.simulation import CallState, Simulated

# A call is served well if its first token comes so soon, and the others so fast.
MAX_FIRST_S = 1.0
MAX_GAP_S = 0.1
WINDOW_S = 2.0


@dataclass(frozen=True)
class Window:
    """Calls that arrived in a stretch of time."""

    at_s: float  # its middle
    goodput: float  # calls a second that were served well
    p99_first_s: float


@dataclass(frozen=True)
class Outcome:
    balance: str
    num_calls: int
    num_failed: int
    num_retries: int
    goodput: float
    share_good: float
    p50_first_s: float
    p99_first_s: float
    hit_rate: float
    loads: tuple[float, ...]  # of each replica: the mean of calls that it had; the largest first
    windows: tuple[Window, ...]

    @property
    def imbalance(self) -> float:
        """The most loaded replica's share of the mean."""
        return self.loads[0] / statistics.mean(self.loads)


def summarize(balance: str, result: Simulated, from_s: float, to_s: float) -> Outcome:
    """`from_s`: before it, caches were filling."""
    counted = [each for each in result.calls if each.call.at_s >= from_s]
    firsts = [_first_s(each) for each in counted]
    num_good = sum(map(is_good, counted))
    loads = [0.0] * len(result.replicas)
    for each in counted:
        if each.end_s is not None:
            loads[each.server] += (each.end_s - each.call.at_s) / (to_s - from_s)
    return Outcome(
        balance=balance,
        num_calls=len(counted),
        num_failed=sum(each.has_failed for each in counted),
        num_retries=result.num_retries,
        goodput=num_good / (to_s - from_s),
        share_good=num_good / len(counted),
        p50_first_s=percentile(firsts, 0.50),
        p99_first_s=percentile(firsts, 0.99),
        hit_rate=sum(each.num_cached for each in result.replicas)
        / sum(each.num_prompt for each in result.replicas),
        loads=tuple(sorted(loads, reverse=True)),
        windows=_windows(result.calls, to_s),
    )


def is_good(state: CallState) -> bool:
    if state.first_s is None or state.end_s is None:
        return False
    gap_s = (state.end_s - state.first_s) / max(1, state.call.num_new - 1)
    return _first_s(state) <= MAX_FIRST_S and gap_s <= MAX_GAP_S


def percentile(values: Sequence[float], share: float) -> float:
    """One of the values: some are infinite, and nothing lies between those."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def _first_s(state: CallState) -> float:
    return float("inf") if state.first_s is None else state.first_s - state.call.at_s


def _windows(calls: Sequence[CallState], to_s: float) -> tuple[Window, ...]:
    found: list[list[CallState]] = [[] for _ in range(max(1, round(to_s / WINDOW_S)))]
    for each in calls:
        found[min(int(each.call.at_s / WINDOW_S), len(found) - 1)].append(each)
    return tuple(
        Window(
            (number + 0.5) * WINDOW_S,
            sum(map(is_good, each)) / WINDOW_S,
            percentile([_first_s(call) for call in each], 0.99),
        )
        for number, each in enumerate(found)
        if each
    )
