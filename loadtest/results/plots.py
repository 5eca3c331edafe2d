"""Plots of a run.

Knows: records, samples at the server, matplotlib. Does not know: pages, how the load was made.
The colours are Okabe and Ito's, which colour-blind people can tell apart; lines also differ in
their dashes.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from quill.loadtest.environment.process import ProcessSample, busy_cores
from quill.loadtest.environment.server import MetricsSample
from quill.loadtest.results.slo import SHARE, RateTrial
from quill.loadtest.workload.records import RequestRecord

BLUE, ORANGE, GREEN, RED, BLACK = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#000000"
_SERIES = ((50, BLUE, "-"), (95, ORANGE, "--"), (99, RED, ":"))
_WINDOWS = 40  # at most, over a run
_SIZE = (8.0, 4.0)
PLAIN = FuncFormatter(lambda value, _: f"{value:,.10g}")  # never 1e+06

Floats = npt.NDArray[np.float64]


class Plot(NamedTuple):
    file: str
    title: str
    note: str


def new_figure(title: str, num_panels: int = 1) -> tuple[Figure, list[Any]]:
    """No window, no global state."""
    with mpl.rc_context({"font.size": 10}):
        figure = Figure(figsize=(_SIZE[0], _SIZE[1] * (1 if num_panels == 1 else 1.6)), dpi=120)
        panels = figure.subplots(num_panels, 1, sharex=True, squeeze=False)[:, 0]
    figure.suptitle(title)
    for panel in panels:
        panel.grid(True, color="0.9")
        panel.set_axisbelow(True)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    return figure, list(panels)


def legend_above(panel: Any) -> None:
    """Above the panel, where it covers no data."""
    panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)


def save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path)


def edges(records: Sequence[RequestRecord]) -> Floats:
    """Windows of equal length over the run, in seconds since 1970, none under half a second."""
    start_s = min(record.intended_at_s for record in records)
    end_s = max(record.intended_at_s + record.total_ms / 1000 for record in records)
    number = max(1, min(_WINDOWS, int((end_s - start_s) / 0.5)))
    return np.linspace(start_s, max(end_s, start_s + 1e-3), number + 1)


def latency_over_time(records: Sequence[RequestRecord], path: Path) -> None:
    bounds = edges(records)
    first = [(r.intended_at_s, r.first_token_ms) for r in records if r.first_token_ms is not None]
    gaps = [
        (record.intended_at_s + at_ms / 1000, gap_ms)
        for record in records
        for at_ms, gap_ms in zip(record.arrivals_ms[1:], record.gaps_ms, strict=True)
    ]
    figure, panels = new_figure("Latency over time", 2)
    for panel, points, name in zip(
        panels, (first, gaps), ("time to first token", "gap between tokens"), strict=True
    ):
        _percentile_lines(panel, points, bounds)
        panel.set_ylabel(f"{name} (ms)")
        panel.set_ylim(bottom=0)
        panel.yaxis.set_major_formatter(PLAIN)
    legend_above(panels[0])
    panels[-1].set_xlabel("seconds since the start (first tokens: when the request was due)")
    save(figure, path)


def _percentile_lines(panel: Any, points: Sequence[tuple[float, float]], bounds: Floats) -> None:
    if not points:
        return
    times, values = np.array(points).T
    window = np.clip(np.digitize(times, bounds) - 1, 0, len(bounds) - 2)
    used = np.unique(window)
    middle = (bounds[used] + bounds[used + 1]) / 2 - bounds[0]
    for percent, colour, dashes in _SERIES:
        heights = [np.percentile(values[window == each], percent) for each in used]
        panel.plot(middle, heights, dashes, color=colour, marker=".", label=f"p{percent}")


def histogram(name: str) -> Callable[[Sequence[float], Path], None]:
    """Of milliseconds: a logarithmic axis, for a few slow ones matter as much as the many."""

    def draw(values: Sequence[float], path: Path) -> None:
        figure, (panel,) = new_figure(f"{name[0].upper()}{name[1:]}")
        # Tokens that came together have no gap between them: all below 0.1 ms is one column.
        shown = np.maximum(np.array(values), 0.1)
        low, high = shown.min(), max(shown.max(), shown.min() * 1.5)
        panel.hist(shown, bins=np.geomspace(low, high, 50).tolist(), color=BLUE, alpha=0.75)
        for percent, colour, dashes in _SERIES:
            at = float(np.percentile(values, percent))
            panel.axvline(
                max(at, 0.1), color=colour if percent != 50 else BLACK, ls=dashes,
                label=f"p{percent}: {at:,.1f} ms",
            )  # fmt: skip
        panel.set_xscale("log")
        is_wide = high > 1000 * low  # more ticks than that would run into one another
        panel.xaxis.set_major_locator(LogLocator(subs=(1.0,) if is_wide else (1.0, 2.0, 5.0)))
        panel.xaxis.set_major_formatter(PLAIN)
        panel.xaxis.set_minor_locator(NullLocator())
        below = ", 0.1 and less in one" if min(values) < 0.1 else ""
        panel.set_xlabel(f"{name} (ms, logarithmic{below})")
        panel.set_ylabel(f"number of {'gaps' if 'gap' in name else 'requests'}")
        panel.yaxis.get_major_locator().set_params(integer=True)
        legend_above(panel)
        save(figure, path)

    return draw


def concurrency(records: Sequence[RequestRecord], path: Path) -> None:
    """Tokens a second against requests in flight, window by window."""
    bounds = edges(records)
    widths = np.diff(bounds)
    starts = np.array([record.intended_at_s for record in records])
    ends = starts + np.array([record.total_ms for record in records]) / 1000
    overlap = np.minimum(ends[:, None], bounds[1:]) - np.maximum(starts[:, None], bounds[:-1])
    in_flight = np.clip(overlap, 0, None).sum(axis=0) / widths
    arrived = [r.intended_at_s + at_ms / 1000 for r in records for at_ms in r.arrivals_ms]
    tokens = np.histogram(arrived, bounds)[0] / widths
    figure, (panel,) = new_figure("Throughput against concurrency")
    panel.scatter(
        in_flight, tokens, color=BLUE, alpha=0.6, label=f"one window of {widths[0]:.1f} s"
    )
    panel.set_xlabel("requests in flight (mean over the window)")
    panel.set_ylabel("tokens/s received")
    panel.set_xlim(0, 1.05 * in_flight.max())
    panel.set_ylim(bottom=0)
    legend_above(panel)
    save(figure, path)


def server_load(samples: Sequence[MetricsSample], start_s: float, path: Path) -> None:
    """`start_s`: of the load, since 1970. Earlier samples are of an idle server."""
    samples = [sample for sample in samples if sample.at_s >= start_s] or samples
    seconds = np.array([sample.at_s for sample in samples]) - start_s
    figure, panels = new_figure("The server: queue depth and running sequences", 2)
    series: tuple[tuple[str, list[float], str], ...] = (
        ("requests waiting", [sample.queue_depth for sample in samples], RED),
        ("running sequences", [sample.running_sequences for sample in samples], BLUE),
    )
    for panel, (name, values, colour) in zip(panels, series, strict=True):
        panel.step(seconds, values, where="post", color=colour)
        panel.fill_between(seconds, values, step="post", color=colour, alpha=0.15)
        panel.set_ylabel(name)
        panel.set_ylim(0, max(1.0, 1.1 * max(values)))
        panel.yaxis.get_major_locator().set_params(integer=True)
    panels[-1].set_xlabel("seconds since the start")
    save(figure, path)


def offered_and_served(records: Sequence[RequestRecord], path: Path) -> None:
    """Requests that were due in each window, and those that ended in it."""
    bounds = edges(records)
    middle = (bounds[:-1] + bounds[1:]) / 2 - bounds[0]
    ended = [(record.intended_at_s + record.total_ms / 1000, record.ok) for record in records]
    series = [("due", [record.intended_at_s for record in records], BLACK, ":")]
    series += [("ended as expected", [at_s for at_s, ok in ended if ok], BLUE, "-")]
    series += [("ended with an error", [at_s for at_s, ok in ended if not ok], RED, "--")]
    figure, (panel,) = new_figure("Offered and served")
    for name, times_s, colour, dashes in series:
        if times_s:
            rates = np.histogram(times_s, bounds)[0] / np.diff(bounds)
            panel.plot(middle, rates, dashes, color=colour, marker=".", label=name)
    panel.set_xlabel("seconds since the start")
    panel.set_ylabel("requests/s")
    panel.set_ylim(bottom=0)
    legend_above(panel)
    save(figure, path)


def process_load(samples: Sequence[ProcessSample], start_s: float, path: Path) -> None:
    """`start_s`: of the load, since 1970. At least two samples."""
    seconds = np.array([sample.at_s for sample in samples]) - start_s
    figure, panels = new_figure("The server: processor and memory", 2)
    panels[0].step(seconds[1:], busy_cores(samples), where="pre", color=BLUE)
    panels[0].set_ylabel("busy cores")
    panels[1].plot(seconds, [sample.memory_mb for sample in samples], color=GREEN)
    panels[1].set_ylabel("memory (MB)")
    panels[1].yaxis.set_major_formatter(PLAIN)
    for panel in panels:
        panel.set_ylim(bottom=0)
    panels[-1].set_xlabel("seconds since the start")
    save(figure, path)


def search(trials: Sequence[RateTrial], path: Path) -> None:
    steps = sorted(trials)
    rates = [step.rate for step in steps]
    figure, panels = new_figure("Search for the highest rate that is served well", 2)
    shares = [100 * step.share for step in steps]
    ranges = [step.share_range for step in steps]
    below = [share - 100 * low for share, (low, _) in zip(shares, ranges, strict=True)]
    above = [100 * high - share for share, (_, high) in zip(shares, ranges, strict=True)]
    panels[0].errorbar(
        rates, shares, np.maximum((below, above), 0), fmt="-o", color=BLUE, capsize=3,
        label="with its 95% margin",
    )  # fmt: skip
    panels[0].axhline(100 * SHARE, color=RED, ls="--", label=f"wanted: {SHARE:.0%}")
    panels[0].set_ylabel("served well (% of requests)")
    panels[0].set_ylim(0, 105)
    panels[1].plot(rates, rates, color="0.6", ls=":", label="all requests")
    panels[1].plot(rates, [step.goodput for step in steps], "-o", color=GREEN, label="goodput")
    panels[1].set_ylabel("requests/s served well")
    panels[1].set_ylim(bottom=0)
    panels[1].set_xlabel("offered rate (requests/s, Poisson arrivals)")
    for panel in panels:
        legend_above(panel)
    save(figure, path)
