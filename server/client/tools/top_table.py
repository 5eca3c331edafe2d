"""The table of `quill top`: a line for each server, and one for all of them.

Knows: the metrics' names, columns. Does not know: how metrics are fetched, terminals.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quill.server.prometheus_text import Samples

HEADS = (
    *("server", "health", "running", "waiting", "tokens/s", "TTFT", "ITL"),
    *("KV cache", "prefix hits", "drafts accepted"),
)
LEGEND = (
    "TTFT, ITL: time to first token and between tokens, median / p95; with prefix hits and drafts "
    "accepted of the last minute"
)
_NOTHING = "–"

Buckets = Mapping[float, float]  # observations up to each bound


@dataclass(frozen=True)
class Window:
    """A server's metrics: now, `seconds` ago for rates, and a minute ago for all else."""

    now: Samples
    recent: Samples
    seconds: float
    old: Samples


@dataclass(frozen=True)
class Row:
    """A server that responds has a window; of another one the problem is known."""

    address: str
    window: Window | None
    problem: str = ""

    @property
    def is_serving(self) -> bool:
        return self.window is not None and bool(self.window.now.value("quill_serving"))


def table(rows: Sequence[Row]) -> list[str]:
    """The heads, a line for each server, and one for all if there are several."""
    cells = [list(HEADS)]
    for row in rows:
        if row.window is None:
            cells.append([row.address, row.problem])
        else:
            health = "serving" if row.is_serving else "not serving"
            cells.append([row.address, health, *columns([row.window])])
    if len(rows) > 1:
        health = f"{sum(row.is_serving for row in rows)} of {len(rows)} serve"
        windows = [row.window for row in rows if row.window is not None]
        cells.append(["all", health, *columns(windows)])
    return _aligned(cells)


def columns(windows: Sequence[Window]) -> list[str]:
    """Of these servers together."""

    def gauge(name: str) -> float:
        return sum(each.now.value(f"quill_{name}") for each in windows)

    def increase(name: str) -> float:
        name = f"quill_{name}_total"
        return sum(each.now.value(name) - each.old.value(name) for each in windows)

    def ratio(part: float, whole: float) -> str:
        return f"{part / whole:.0%}" if whole > 0 else _NOTHING

    tokens_per_s = sum(map(_tokens_per_s, windows))
    hits = increase("prefix_cache_hits")
    return [
        f"{gauge('sequences_running'):g}/{gauge('max_num_seqs'):g}",
        f"{gauge('requests_waiting'):g}",
        f"{tokens_per_s:,.{0 if tokens_per_s >= 10 else 1}f}",
        _quantiles(buckets(windows, "quill_time_to_first_token_seconds")),
        _quantiles(buckets(windows, "quill_inter_token_latency_seconds")),
        ratio(gauge("kv_blocks_used"), gauge("kv_blocks")),
        ratio(hits, hits + increase("prefix_cache_misses")),
        ratio(increase("spec_accepted_tokens"), increase("spec_draft_tokens")),
    ]


def _tokens_per_s(window: Window) -> float:
    name = "quill_generation_tokens_total"
    increase = window.now.value(name) - window.recent.value(name)
    return increase / window.seconds if window.seconds > 0 else 0.0


def buckets(windows: Sequence[Window], name: str) -> Buckets:
    """A histogram's increase, of all servers together."""
    found: dict[float, float] = {}
    for window in windows:
        old = window.old.buckets(name)
        for bound, count in window.now.buckets(name).items():
            found[bound] = found.get(bound, 0.0) + count - old.get(bound, 0.0)
    return dict(sorted(found.items()))


def quantile(buckets: Buckets, q: float) -> float | None:
    """Interpolated within a bucket, as Prometheus does. None: there are no observations."""
    bounds = list(buckets)
    if not bounds or buckets[bounds[-1]] <= 0:
        return None
    wanted = q * buckets[bounds[-1]]
    below, least = 0.0, 0.0
    for bound in bounds[:-1]:
        if buckets[bound] >= wanted:
            return least + (wanted - below) / (buckets[bound] - below) * (bound - least)
        below, least = buckets[bound], bound
    return least  # beyond the last bound


def _quantiles(buckets: Buckets) -> str:
    both = [quantile(buckets, q) for q in (0.5, 0.95)]
    return " / ".join(_duration(each) for each in both if each is not None) or _NOTHING


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    ms = 1000 * seconds
    return f"{ms:.{0 if ms >= 10 else 1}f} ms"


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Names to the left, numbers to the right. A problem extends over the columns after it."""
    whole = [each for each in cells if len(each) == len(HEADS)]
    widths = [max(len(each[column]) for each in whole) for column in range(len(HEADS))]
    widths[0] = max(len(each[0]) for each in cells)
    lines = []
    for each in cells:
        padded = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(each, widths, strict=False))
        ]
        lines.append("  ".join(padded).rstrip())
    return lines
