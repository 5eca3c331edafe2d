"""A run and its numbers.

Knows: records, samples. Does not know: plots, pages, how the load was made.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quill.loadtest.environment.process import ProcessSample, busy_cores
from quill.loadtest.environment.server import MetricsSample
from quill.loadtest.results.slo import RateTrial, Slo
from quill.loadtest.workload.records import RequestRecord

PERCENTILES = (50, 90, 95, 99)


@dataclass
class Run:
    """All data of a run."""

    records: list[RequestRecord] = field(default_factory=list)
    info: dict[str, str] = field(default_factory=dict)  # machine, commit, command, model, …
    samples: list[MetricsSample] = field(default_factory=list)
    process: list[ProcessSample] = field(default_factory=list)  # of the server, under load
    slo: Slo | None = None
    trials: list[RateTrial] = field(default_factory=list)
    verified: str = ""
    notes: list[str] = field(default_factory=list)
    is_whole: bool = True  # False: Ctrl-C ended it early

    @property
    def start_s(self) -> float:
        """Of the load, since 1970."""
        return min(record.intended_at_s for record in self.records)


class ServerUsage(NamedTuple):
    busy_cores: float  # on average
    peak_mb: float


def server_usage(run: Run) -> ServerUsage | None:
    """None if there are fewer than two samples."""
    if len(run.process) < 2:
        return None
    first, last = run.process[0], run.process[-1]
    cores = busy_cores((first, last))[0]
    return ServerUsage(cores, max(sample.memory_mb for sample in run.process))


@dataclass(frozen=True)
class Summary:
    num_requests: int
    num_tokens: int
    wall_s: float
    statuses: dict[str, int]  # of all requests
    errors: dict[str, int]  # of requests with an unexpected status
    finish_reasons: dict[str, int]
    cached_share: float  # of prompt tokens
    offered_per_s: float  # requests due between the first start and the last
    served_per_s: float  # those that ended with an expected status in that time
    percentiles_ms: dict[str, tuple[float, ...]]  # by measure, one for each of PERCENTILES
    slo_share: float | None = None
    goodput: float | None = None  # requests a second
    num_prompt_tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s if self.wall_s else 0.0

    @property
    def prompt_tokens_per_s(self) -> float:
        """Of prompts and of texts to embed."""
        return self.num_prompt_tokens / self.wall_s if self.wall_s else 0.0

    @property
    def requests_per_s(self) -> float:
        return self.num_requests / self.wall_s if self.wall_s else 0.0


def summarize(records: Sequence[RequestRecord], slo: Slo | None = None) -> Summary:
    wall_s = span_s(records)
    offered_per_s, served_per_s = _offered_and_served(records)
    prompt_tokens = sum(record.prompt_tokens for record in records)
    served_well = sum(map(slo.is_met, records)) if slo else 0
    return Summary(
        num_requests=len(records),
        num_tokens=sum(record.num_tokens for record in records),
        wall_s=wall_s,
        statuses=_count(record.status for record in records),
        errors=_count(record.status for record in records if not record.ok),
        finish_reasons=_count(record.finish_reason for record in records if record.finish_reason),
        cached_share=sum(record.cached_tokens for record in records) / max(1, prompt_tokens),
        offered_per_s=offered_per_s,
        served_per_s=served_per_s,
        percentiles_ms={name: _percentiles(values) for name, values in measures(records).items()},
        slo_share=slo.share(records) if slo else None,
        goodput=served_well / wall_s if slo and wall_s else None,
        num_prompt_tokens=prompt_tokens,
    )


def span_s(records: Sequence[RequestRecord]) -> float:
    """From the first request's intended start to the last one's end."""
    if not records:
        return 0.0
    start_s = min(record.intended_at_s for record in records)
    return max(record.intended_at_s + record.total_ms / 1000 for record in records) - start_s


def _offered_and_served(records: Sequence[RequestRecord]) -> tuple[float, float]:
    """Requests a second while the load came. Requests that end afterwards don't count as served."""
    starts_s = [record.intended_at_s for record in records]
    window_s = max(starts_s, default=0.0) - min(starts_s, default=0.0)
    if not window_s:
        return 0.0, 0.0
    ends_s = [record.intended_at_s + record.total_ms / 1000 for record in records if record.ok]
    return (len(records) - 1) / window_s, sum(end <= max(starts_s) for end in ends_s) / window_s


def by_scenario(records: Sequence[RequestRecord], slo: Slo | None = None) -> dict[str, Summary]:
    names = sorted({record.scenario for record in records})
    return {
        name: summarize([record for record in records if record.scenario == name], slo)
        for name in names
    }


def scenario_table(scenarios: Mapping[str, Summary]) -> list[list[str]]:
    """Header first. Percentiles are milliseconds: of first tokens, gaps and whole answers."""
    short = {"time to first token": "first", "gap between tokens": "gap", "whole answer": "whole"}
    columns = [(name, percent) for name in short for percent in (50, 95)]
    heads = [f"{short[name]} p{percent}" for name, percent in columns]
    rows = [["scenario", "requests", "errors", "tokens", *heads]]
    for name, summary in scenarios.items():
        counts = (summary.num_requests, sum(summary.errors.values()), summary.num_tokens)
        cells = [_cell(summary, *column) for column in columns]
        rows.append([name, *(f"{count:,}" for count in counts), *cells])
    return rows


def _cell(summary: Summary, name: str, percent: int) -> str:
    values = summary.percentiles_ms[name]
    return f"{values[PERCENTILES.index(percent)]:,.1f}" if values else "–"


def measures(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """All values in milliseconds, under the names that reports show."""
    first = [record.first_token_ms for record in records]
    by_server = [record.server_first_token_ms for record in records]
    queued = [record.server_queue_ms for record in records]
    per_token = [record.per_token_ms for record in records]
    return {
        "time to first token": [value for value in first if value is not None],
        "… measured by the server": [value for value in by_server if value is not None],
        "… waiting in its queue": [value for value in queued if value is not None],
        "gap between tokens": [gap for record in records for gap in record.gaps_ms],
        "time per output token": [value for value in per_token if value is not None],
        "whole answer": [record.total_ms for record in records if record.status == "OK"],
        "sending delay": [record.late_ms for record in records],
    }


def table(summary: Summary) -> list[list[str]]:
    """Header first."""
    rows = [["milliseconds", *(f"p{percent}" for percent in PERCENTILES), "max"]]
    for name, values in summary.percentiles_ms.items():
        shown = [f"{value:,.1f}" for value in values] or ["–"] * (len(PERCENTILES) + 1)
        rows.append([name, *shown])
    return rows


def _count(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _percentiles(values: Sequence[float]) -> tuple[float, ...]:
    """And the largest. Empty if there are none."""
    if not values:
        return ()
    return (*(float(value) for value in np.percentile(values, PERCENTILES)), max(values))
