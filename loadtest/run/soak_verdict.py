"""The criteria of a soak test, and whether they were met.

Knows: records, samples of the process, the server's log. Does not know: how the load was made.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quill.loadtest.environment.process import ProcessSample, slope_mb_per_minute
from quill.loadtest.results.verify import Verdict
from quill.loadtest.workload.records import RequestRecord

MAX_SLOPE_MB = 1.0  # a minute
MAX_REJECTION_MS = 100.0
MIN_SLOPE_S = 120.0  # shorter runs have no meaningful slope
REJECTED = "RESOURCE_EXHAUSTED"


@dataclass(frozen=True)
class SoakResult:
    """All measurements. `bound_ms` is for the 99th percentile of accepted requests."""

    records: Sequence[RequestRecord]
    num_sent: int
    num_ended: int  # as the server counted them
    bound_ms: float
    start: ProcessSample
    end: ProcessSample
    samples: Sequence[ProcessSample]  # after the warm-up
    is_idle: bool
    log: Sequence[Mapping[str, Any]]  # the server's
    verdict: Verdict


@dataclass
class Judgement:
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def note(self, is_well: bool, text: str) -> None:
        self.lines.append(f"{'ok  ' if is_well else 'FAIL'} {text}")
        if not is_well:
            self.failures.append(text)


def judge(soaked: SoakResult) -> Judgement:
    judgement = Judgement()
    _judge_ends(soaked, judgement)
    _judge_times(soaked, judgement)
    _judge_process(soaked, judgement)
    judgement.note(not soaked.verdict.differences, str(soaked.verdict))
    return judgement


def _judge_ends(soaked: SoakResult, judgement: Judgement) -> None:
    records = soaked.records
    statuses = Counter(record.status for record in records)
    listed = ", ".join(f"{number:,} {status}" for status, number in statuses.most_common())
    judgement.note(len(records) == soaked.num_sent, f"{len(records):,} calls ended: {listed}")
    wrong = Counter(record.status for record in records if not record.ok)
    judgement.note(not wrong, f"{wrong.total():,} ended with unexpected statuses ({dict(wrong)})")
    # A client with a deadline, or one that cancels, may be gone before the server has its call.
    early = sum(record.status in ("DEADLINE_EXCEEDED", "CANCELLED") for record in records)
    is_exact = len(records) - early <= soaked.num_ended <= len(records)
    judgement.note(is_exact, f"{soaked.num_ended:,} ended at the server, each once")
    judgement.note(soaked.is_idle, "at the end no sequence runs and no request waits")


def _judge_times(soaked: SoakResult, judgement: Judgement) -> None:
    """The server's own times: on a busy machine, clients receive late."""
    for name, status, bound_ms in (
        ("accepted", "OK", soaked.bound_ms),
        ("rejected", REJECTED, MAX_REJECTION_MS),
    ):
        took_ms = times_ms(soaked.log, status)
        if not took_ms:
            judgement.note(False, f"no request was {name}: this was no overload")
            continue
        p99_ms = float(np.percentile(took_ms, 99))
        client_ms = [
            each.total_ms - each.late_ms for each in soaked.records if each.status == status
        ]
        client_p99_ms = float(np.percentile(client_ms or [0.0], 99))
        judgement.note(
            p99_ms <= bound_ms,
            f"{name}: p99 {p99_ms:,.1f} ms at the server, and {bound_ms:,.0f} ms is the limit "
            f"({client_p99_ms:,.0f} ms at these clients)",
        )


def times_ms(log: Sequence[Mapping[str, Any]], status: str) -> list[float]:
    """Durations of the streams with this status, from the server's log."""
    wanted = ("GenerateStream", status)
    return [
        entry["total_ms"] for entry in log if (entry.get("method"), entry.get("outcome")) == wanted
    ]


def _judge_process(soaked: SoakResult, judgement: Judgement) -> None:
    start, end, samples = soaked.start, soaked.end, soaked.samples
    memory = f"memory {start.memory_mb:,.0f} MB before, {end.memory_mb:,.0f} MB after"
    if len(samples) < 2 or samples[-1].at_s - samples[0].at_s < MIN_SLOPE_S:
        judgement.lines.append(f"--   {memory}; too short for a slope")
    else:
        slope = slope_mb_per_minute(samples)
        judgement.note(slope <= MAX_SLOPE_MB, f"{memory}; {slope:+.2f} MB/min after the warm-up")
    judgement.note(
        end.num_fds <= start.num_fds, f"descriptors {start.num_fds} before, {end.num_fds} after"
    )
    # asyncio's pool keeps its threads for the next call, and has so many at most.
    pool = min(32, (os.cpu_count() or 1) + 4)
    is_well = end.num_threads <= start.num_threads + pool
    judgement.note(is_well, f"threads {start.num_threads} before, {end.num_threads} after")
