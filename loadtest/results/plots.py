"""Plots of a run.

Knows: records, samples at the server, matplotlib. Does not know: pages, how the load was made.
The colours are Okabe and Ito's, which colour-blind people can tell apart; lines also differ in
their dashes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from quill.loadtest.environment.process import busy_cores
from quill.loadtest.results.slo import SHARE
from quill.loadtest.results.summary import Run, measures, server_usage
from quill.loadtest.workload.records import RequestRecord

BLUE, ORANGE, GREEN, RED, BLACK = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#000000"
_SERIES = ((50, BLUE, "-"), (95, ORANGE, "--"), (99, RED, ":"))
_WINDOWS = 40  # at most, over a run
_SIZE = (8.0, 4.0)
_SECONDS = "seconds since the start"
_PLAIN = FuncFormatter(lambda value, _: f"{value:,.10g}")  # never 1e+06

Floats = npt.NDArray[np.float64]


def _panels(x_label: str, *y_labels: str) -> tuple[Figure, list[Any]]:
    """A panel for each label, from 0 up, above a common axis. No window, no global state."""
    number = len(y_labels)
    with mpl.rc_context({"font.size": 10}):
        figure = Figure(figsize=(_SIZE[0], _SIZE[1] * (1 if number == 1 else 1.6)), dpi=120)
        panels = figure.subplots(number, 1, sharex=True, squeeze=False)[:, 0]
    for panel, label in zip(panels, y_labels, strict=True):
        panel.grid(True, color="0.9")
        panel.set_axisbelow(True)
        panel.set_ylabel(label)
        panel.yaxis.set_major_formatter(_PLAIN)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    panels[-1].set_xlabel(x_label)
    return figure, list(panels)


def save(figure: Figure, title: str, path: Path) -> None:
    figure.suptitle(title)
    for panel in figure.axes:
        if panel.get_yscale() == "linear":
            panel.set_ylim(bottom=0)
        if panel.get_legend_handles_labels()[0]:  # above the panel, where it covers no data
            panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def edges(records: Sequence[RequestRecord]) -> Floats:
    """Windows of equal length over the run, in seconds since 1970, none under half a second."""
    start_s = min(record.intended_at_s for record in records)
    end_s = max(record.intended_at_s + record.total_ms / 1000 for record in records)
    number = max(1, min(_WINDOWS, int((end_s - start_s) / 0.5)))
    return np.linspace(start_s, max(end_s, start_s + 1e-3), number + 1)


def latency_over_time(run: Run) -> Figure | None:
    records = run.records
    first = [(r.intended_at_s, r.first_token_ms) for r in records if r.first_token_ms is not None]
    gaps = [
        (record.intended_at_s + at_ms / 1000, gap_ms)
        for record in records
        for at_ms, gap_ms in zip(record.arrivals_ms[1:], record.gaps_ms, strict=True)
    ]
    if not first:
        return None
    x_label = f"{_SECONDS} (first tokens: when the request was due)"
    figure, panels = _panels(x_label, "time to first token (ms)", "gap between tokens (ms)")
    for panel, points in zip(panels, (first, gaps), strict=True):
        _percentile_lines(panel, points, edges(records))
    return figure


def _percentile_lines(panel: Any, points: Sequence[tuple[float, float]], bounds: Floats) -> None:
    if not points:
        return
    times, values = np.array(points).T
    window = np.clip(np.digitize(times, bounds) - 1, 0, len(bounds) - 2)
    used = np.unique(window)
    middle = (bounds[used] + bounds[used + 1]) / 2 - bounds[0]
    for percent, color, dashes in _SERIES:
        heights = [np.percentile(values[window == each], percent) for each in used]
        panel.plot(middle, heights, dashes, color=color, marker=".", label=f"p{percent}")


def histogram(run: Run, name: str, counted: str) -> Figure | None:
    """Of milliseconds: a logarithmic axis, for a few slow ones matter as much as the many."""
    values = measures(run.records)[name]
    if not values:
        return None
    below = ", 0.1 and less in one" if min(values) < 0.1 else ""
    figure, (panel,) = _panels(f"{name} (ms, logarithmic{below})", f"number of {counted}")
    # Tokens that came together have no gap between them: all below 0.1 ms is one column.
    shown = np.maximum(np.array(values), 0.1)
    low, high = shown.min(), max(shown.max(), shown.min() * 1.5)
    panel.hist(shown, bins=np.geomspace(low, high, 50).tolist(), color=BLUE, alpha=0.75)
    for percent, color, dashes in _SERIES:
        at = float(np.percentile(values, percent))
        line = {"color": color if percent != 50 else BLACK, "ls": dashes}
        panel.axvline(max(at, 0.1), label=f"p{percent}: {at:,.1f} ms", **line)
    panel.set_xscale("log")
    is_wide = high > 1000 * low  # more ticks than that would run into one another
    panel.xaxis.set_major_locator(LogLocator(subs=(1.0,) if is_wide else (1.0, 2.0, 5.0)))
    panel.xaxis.set_major_formatter(_PLAIN)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.get_major_locator().set_params(integer=True)
    return figure


def concurrency(run: Run) -> Figure | None:
    """Tokens a second against requests in flight, window by window."""
    records, bounds = run.records, edges(run.records)
    widths = np.diff(bounds)
    starts = np.array([record.intended_at_s for record in records])
    ends = starts + np.array([record.total_ms for record in records]) / 1000
    overlap = np.minimum(ends[:, None], bounds[1:]) - np.maximum(starts[:, None], bounds[:-1])
    in_flight = np.clip(overlap, 0, None).sum(axis=0) / widths
    arrived = [r.intended_at_s + at_ms / 1000 for r in records for at_ms in r.arrivals_ms]
    if not arrived:
        return None
    tokens = np.histogram(arrived, bounds)[0] / widths
    x_label = "requests in flight (mean over the window)"
    figure, (panel,) = _panels(x_label, "tokens/s received")
    label = f"one window of {widths[0]:.1f} s"
    panel.scatter(in_flight, tokens, color=BLUE, alpha=0.6, label=label)
    panel.set_xlim(0, 1.05 * in_flight.max())
    return figure


def server_load(run: Run) -> Figure | None:
    """Samples from before the load are of an idle server."""
    if not run.samples:
        return None
    start_s = run.start_s
    samples = [sample for sample in run.samples if sample.at_s >= start_s] or run.samples
    seconds = np.array([sample.at_s for sample in samples]) - start_s
    figure, panels = _panels(_SECONDS, "requests waiting", "running sequences")
    _, waiting, running = zip(*samples, strict=True)
    for panel, values, color in zip(panels, (waiting, running), (RED, BLUE), strict=True):
        panel.step(seconds, values, where="post", color=color)
        panel.fill_between(seconds, values, step="post", color=color, alpha=0.15)
        panel.set_ylim(0, max(1.0, 1.1 * max(values)))
        panel.yaxis.get_major_locator().set_params(integer=True)
    return figure


def offered_and_served(run: Run) -> Figure | None:
    """Requests that were due in each window, and those that ended in it."""
    records, bounds = run.records, edges(run.records)
    if not any(record.arrivals_ms for record in records):
        return None
    middle = (bounds[:-1] + bounds[1:]) / 2 - bounds[0]
    ended = [(record.intended_at_s + record.total_ms / 1000, record.ok) for record in records]
    series = [("due", [record.intended_at_s for record in records], BLACK, ":")]
    series += [("ended as expected", [at_s for at_s, ok in ended if ok], BLUE, "-")]
    series += [("ended with an error", [at_s for at_s, ok in ended if not ok], RED, "--")]
    figure, (panel,) = _panels(_SECONDS, "requests/s")
    for name, times_s, color, dashes in series:
        if times_s:
            rates = np.histogram(times_s, bounds)[0] / np.diff(bounds)
            panel.plot(middle, rates, dashes, color=color, marker=".", label=name)
    return figure


def process_load(run: Run) -> Figure | None:
    if server_usage(run) is None:
        return None
    seconds = np.array([sample.at_s for sample in run.process]) - run.start_s
    figure, panels = _panels(_SECONDS, "busy cores", "memory (MB)")
    panels[0].step(seconds[1:], busy_cores(run.process), where="pre", color=BLUE)
    panels[1].plot(seconds, [sample.memory_mb for sample in run.process], color=GREEN)
    return figure


def search(run: Run) -> Figure | None:
    if not run.trials:
        return None
    steps = sorted(run.trials)
    rates, shares = [step.rate for step in steps], [100 * step.share for step in steps]
    low, high = (100 * np.array([step.share_range for step in steps])).T
    margins = np.maximum((shares - low, high - shares), 0)
    x_label = "offered rate (requests/s, Poisson arrivals)"
    figure, panels = _panels(x_label, "served well (% of requests)", "requests/s served well")
    line = {"color": BLUE, "capsize": 3, "label": "with its 95% margin"}
    panels[0].errorbar(rates, shares, margins, fmt="-o", **line)
    panels[0].axhline(100 * SHARE, color=RED, ls="--", label=f"wanted: {SHARE:.0%}")
    panels[0].set_ylim(0, 105)
    panels[1].plot(rates, rates, color="0.6", ls=":", label="all requests")
    panels[1].plot(rates, [step.goodput for step in steps], "-o", color=GREEN, label="goodput")
    return figure


class Plot(NamedTuple):
    file: str
    title: str
    note: str
    draw: Callable[[Run], Figure | None]  # None: the run has no data for it
    missing: str = ""  # what the page says then


_ALL = "All of the run; note the logarithmic axis."
_FIRST = partial(histogram, name="time to first token", counted="requests")
_GAPS = partial(histogram, name="gap between tokens", counted="gaps")
PLOTS = (
    Plot("latency.png", "Latency over time", "Percentiles of each window.", latency_over_time),
    Plot("first_token.png", "Time to first token", _ALL, _FIRST),
    Plot("gaps.png", "Gap between tokens", _ALL, _GAPS),
    Plot(
        "concurrency.png",
        "Throughput against concurrency",
        "Each point is one window of the run. A ramp (--shape ramp) shows the whole curve.",
        concurrency,
    ),
    Plot(
        "offered.png",
        "Offered and served",
        "Where the lines part, requests wait; where they meet again, the queue is empty.",
        offered_and_served,
    ),
    Plot(
        "server.png",
        "Queue depth and running sequences",
        "From the server's metrics.",
        server_load,
        "Queue depth and running sequences are left out: the server's metrics couldn't be read "
        "(--metrics URL says where they are).",
    ),
    Plot(
        "process.png",
        "Processor and memory",
        "Of the server's processes together, sampled once a second.",
        process_load,
        "The server's processor and memory are left out: they are measured of a server that the "
        "load test itself starts (no --address), and in a load of some seconds.",
    ),
    Plot("search.png", "Search", "Each point is one rate, held for a while.", search),
)
