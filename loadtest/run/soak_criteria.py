"""What a soak must have shown: every call ended as it should, in time, and nothing has leaked.

Knows: the records, the server's log, its process before and after. Does not know: how the load was
made.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quill.loadtest.environment.faults import num_logged
from quill.loadtest.environment.process import ProcessSample, slope_mb_per_minute
from quill.loadtest.results.verify import Verdict
from quill.loadtest.workload.records import RequestRecord

MAX_SLOPE_MB = 1.0  # a minute
MAX_REJECTION_MS = 100.0
MIN_SLOPE_S = 120.0  # shorter runs have no meaningful slope
REJECTED = "RESOURCE_EXHAUSTED"
# A client with a deadline, or one that cancels, may be gone before the server has its call.
EARLY = ("DEADLINE_EXCEEDED", "CANCELLED", "UNAVAILABLE")


@dataclass(frozen=True, kw_only=True)
class SoakOptions:
    """`load_factor`: of the measured capacity."""

    duration_s: float
    num_verified: int = 200
    load_factor: float = 2.0
    num_keys: int = 0  # 0: the server has no API keys
    faults: Sequence[str] = ()
    fault_period_s: float = 60.0


@dataclass(frozen=True)
class SoakResult:
    """All measurements. `bound_ms` is for the 99th percentile of accepted requests."""

    records: Sequence[RequestRecord]
    num_sent: int
    num_ended: int  # as the server logged them
    bound_ms: float
    start: ProcessSample
    end: ProcessSample
    samples: Sequence[ProcessSample]  # after the warm-up
    is_idle: bool
    log: Sequence[Mapping[str, Any]]  # the server's
    verdict: Verdict
    options: SoakOptions
    injected: Sequence[str] = ()  # faults


@dataclass
class Judgment:
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def note(self, is_well: bool, text: str) -> None:
        self.lines.append(f"{'ok  ' if is_well else 'FAIL'} {text}")
        if not is_well:
            self.failures.append(text)


def judge(soaked: SoakResult) -> Judgment:
    judgment = Judgment()
    _judge_ends(soaked, judgment)
    _judge_faults(soaked, judgment)
    _judge_times(soaked, judgment)
    _judge_process(soaked, judgment)
    judgment.note(not soaked.verdict.differences, str(soaked.verdict))
    return judgment


def _judge_ends(soaked: SoakResult, judgment: Judgment) -> None:
    records = soaked.records
    statuses = Counter(record.status for record in records)
    listed = ", ".join(f"{number:,} {status}" for status, number in statuses.most_common())
    judgment.note(len(records) == soaked.num_sent, f"{len(records):,} calls ended: {listed}")
    wrong = Counter(f"{each.status}: {each.message}" for each in records if not each.ok)
    shown = f"{wrong.total():,} ended with unexpected statuses {wrong.most_common(5)}"
    judgment.note(not wrong, shown)
    early = sum(record.status in EARLY for record in records)
    is_exact = len(records) - early <= soaked.num_ended <= len(records)
    how = "each once"
    if soaked.options.faults:  # what is resumed ends several times
        is_exact, how = len(records) - early <= soaked.num_ended, "each at least once"
    judgment.note(is_exact, f"{soaked.num_ended:,} ended at the server, {how}")
    judgment.note(soaked.is_idle, "at the end no sequence runs and no request waits")


def _judge_faults(soaked: SoakResult, judgment: Judgment) -> None:
    for name in soaked.options.faults:
        number, logged = soaked.injected.count(name), num_logged(soaked.log, name)
        judgment.note(0 < number <= logged, f"{name}: {number} times, and each was noticed")


def _judge_times(soaked: SoakResult, judgment: Judgment) -> None:
    """The server's own times: on a busy machine, clients receive late. With faults, which make them
    longer, they are only shown."""
    for name, status, bound_ms in (
        ("accepted", "OK", soaked.bound_ms),
        ("rejected", REJECTED, MAX_REJECTION_MS),
    ):
        took_ms = times_ms(soaked.log, status)
        if not took_ms:
            judgment.note(False, f"no request was {name}: this was no overload")
            continue
        p99_ms = float(np.percentile(took_ms, 99))
        client_ms = [
            each.total_ms - each.late_ms for each in soaked.records if each.status == status
        ]
        client_p99_ms = float(np.percentile(client_ms or [0.0], 99))
        clients = f"({client_p99_ms:,.0f} ms at these clients)"
        if soaked.options.faults:
            judgment.lines.append(f"--   {name}: p99 {p99_ms:,.1f} ms at the server {clients}")
            continue
        judgment.note(
            p99_ms <= bound_ms,
            f"{name}: p99 {p99_ms:,.1f} ms at the server, and {bound_ms:,.0f} ms is the limit "
            f"{clients}",
        )


def times_ms(log: Sequence[Mapping[str, Any]], status: str) -> list[float]:
    """Durations of the streams with this status, from the server's log."""
    wanted = ("GenerateStream", status)
    return [
        entry["total_ms"] for entry in log if (entry.get("method"), entry.get("outcome")) == wanted
    ]


def _judge_process(soaked: SoakResult, judgment: Judgment) -> None:
    start, end, samples = soaked.start, soaked.end, soaked.samples
    round_s = soaked.options.fault_period_s * len(soaked.options.faults)
    samples = medians(samples, round_s)  # what was killed has another size until it is warm
    memory = f"memory {start.memory_mb:,.0f} MB before, {end.memory_mb:,.0f} MB after"
    if len(samples) < 2 or samples[-1].at_s - samples[0].at_s < MIN_SLOPE_S:
        judgment.lines.append(f"--   {memory}; too short for a slope")
    else:
        slope = slope_mb_per_minute(samples)
        judgment.note(slope <= MAX_SLOPE_MB, f"{memory}; {slope:+.2f} MB/min after the warm-up")
    judgment.note(
        end.num_fds <= start.num_fds, f"descriptors {start.num_fds} before, {end.num_fds} after"
    )
    # asyncio's pool keeps its threads for the next call, and has so many at most.
    pool = min(32, (os.cpu_count() or 1) + 4)
    is_well = end.num_threads <= start.num_threads + pool
    judgment.note(is_well, f"threads {start.num_threads} before, {end.num_threads} after")


def medians(samples: Sequence[ProcessSample], window_s: float) -> Sequence[ProcessSample]:
    """The sample in the middle, by memory, of each window; all, if it has no length."""
    if not window_s or not samples:
        return samples
    windows: dict[int, list[ProcessSample]] = {}
    for each in samples:
        windows.setdefault(int((each.at_s - samples[0].at_s) / window_s), []).append(each)
    by_memory = [sorted(each, key=lambda sample: sample.memory_mb) for each in windows.values()]
    return [each[len(each) // 2] for each in by_memory]
