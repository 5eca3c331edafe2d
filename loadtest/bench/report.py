"""Shows the results of a contest: as a table, as Markdown, as a plot.

Knows: results. Does not know: how they came about.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.table import Table

from quill.loadtest.bench.contest import Result

Rows = list[list[str]]
# Okabe and Ito's: a colour-blind person can tell them apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
HATCHES = ("", "//", "..", "xx")


def rows_of(results: Sequence[Result]) -> tuple[list[str], Rows]:
    """The heading and a line for each contender. Speeds are in tokens a second."""
    tasks = list(results[0].speeds)
    heading = ["", *tasks, "perplexity", "weights MB", "peak MB", "version"]
    rows = [
        [
            f"{result.about.name} {result.about.kind}",
            *(f"{result.speeds[task]:.0f}" for task in tasks),
            "" if math.isnan(result.perplexity) else f"{result.perplexity:.3f}",
            f"{result.about.weight_bytes / 1e6:.0f}",
            f"{result.peak_bytes / 1e6:.0f}",
            result.about.version,
        ]
        for result in results
    ]
    return heading, rows


def table(results: Sequence[Result]) -> Table:
    heading, rows = rows_of(results)
    shown = Table(title="tokens a second, best of all rounds", box=box.SIMPLE_HEAD)
    for index, name in enumerate(heading):
        shown.add_column(
            name,
            justify="left" if index == 0 else "right",
            no_wrap=index == 0,
            min_width=max(map(len, name.split())) if name else None,
        )
    for row in rows:
        shown.add_row(*row)
    return shown


def markdown(results: Sequence[Result], facts: Mapping[str, str]) -> str:
    heading, rows = rows_of(results)
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    told = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    return f"{text}\n\n{told}\n"


def write(results: Sequence[Result], facts: Mapping[str, str], out: Path) -> None:
    """results.json, results.md and speeds.png in a directory."""
    out.mkdir(parents=True, exist_ok=True)
    record = {"facts": facts, "results": [asdict(result) for result in results]}
    (out / "results.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    (out / "results.md").write_text(markdown(results, facts), encoding="utf-8")
    plot(results, out / "speeds.png")


def plot(results: Sequence[Result], path: Path) -> None:
    """A group of bars for each task, relative to its fastest contender."""
    from matplotlib.figure import Figure

    tasks = list(results[0].speeds)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(results)
    for index, result in enumerate(results):
        places = [i + (index - (len(results) - 1) / 2) * width for i in range(len(tasks))]
        best = [max(each.speeds[task] for each in results) for task in tasks]
        heights = [result.speeds[task] / most for task, most in zip(tasks, best, strict=True)]
        axes.bar(
            places,
            heights,
            width,
            label=f"{result.about.name} {result.about.kind} ({result.perplexity:.2f})",
            color=COLOURS[index % len(COLOURS)],
            hatch=HATCHES[index // len(COLOURS)],
            edgecolor="white",
            linewidth=0.3,
        )
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_ylabel("tokens/s, as a share of the fastest")
    axes.set_title("Speed by task; in brackets the perplexity on the same held-out tokens")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
