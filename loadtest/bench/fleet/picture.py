"""A picture of simulated fleets: goodput and first tokens over time, and who had the load.

Knows: matplotlib, outcomes. Does not know: how they came about.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from quill.loadtest.bench.fleet.outcome import MAX_FIRST_S, Outcome
from quill.loadtest.results.plots import BLUE, ORANGE, PLAIN, RED, save

_STYLES = {"round-robin": (RED, ":"), "least": (ORANGE, "--"), "affinity": (BLUE, "-")}


def draw(outcomes: Sequence[Outcome], title: str, dead: tuple[float, float], path: Path) -> None:
    """`dead`: from when to when some replicas were."""
    with mpl.rc_context({"font.size": 10}):
        figure = Figure(figsize=(8.0, 9.0), dpi=120)
        goodput, firsts, loads = figure.subplots(3, 1)
    figure.suptitle(title)
    for each in outcomes:
        colour, dashes = _STYLES[each.balance]
        times = [window.at_s for window in each.windows]
        style = {"color": colour, "ls": dashes, "label": each.balance}
        goodput.plot(times, [window.goodput for window in each.windows], **style)
        firsts.plot(times, [window.p99_first_s for window in each.windows], **style)
        mean = statistics.mean(each.loads)
        loads.plot([load / mean for load in each.loads], **style)
    for panel in (goodput, firsts):
        panel.axvspan(*dead, color="0.9", label="five replicas are dead")
        panel.set_xlabel("simulated seconds (when the call arrived)")
    firsts.axhline(MAX_FIRST_S, color="0.5", lw=0.8)
    firsts.set_yscale("log")
    firsts.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    firsts.yaxis.set_minor_locator(NullLocator())
    firsts.yaxis.set_major_formatter(PLAIN)
    firsts.set_ylabel("time to first token,\np99 (s, logarithmic)")
    goodput.set_ylabel("calls/s served well")
    loads.set_ylabel("calls outstanding / mean\n(over the counted time)")
    loads.set_xlabel("replicas, the most loaded first")
    for panel in (goodput, loads):
        panel.set_ylim(bottom=0)
    for panel in (goodput, firsts, loads):
        panel.grid(True, color="0.93")
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    goodput.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)
    save(figure, path)
