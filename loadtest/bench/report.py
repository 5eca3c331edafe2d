"""The one writer of experiments' results: a table, Markdown, JSON, a plot. And usual columns.

Knows: results of any experiment. Does not know: how they came about.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from quill.loadtest.bench.backends.protocol import BackendInfo
from quill.loadtest.bench.experiment import Column, Experiment, Measured, Results, run_experiment
from quill.loadtest.environment.process import machine_info
from quill.loadtest.errors import LoadtestError, OptionError

# Okabe and Ito's: colour-blind people can tell them apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
HATCHES = ("", "//", "..", "xx")
LABEL = Column("", lambda row, _: str(row.label))


class BarRow(NamedTuple):
    """A row of an experiment that has bars: what is wanted, and what came of it."""

    label: str
    bar: str
    result: str
    more: str


BAR_COLUMNS = [
    LABEL,
    Column("bar", lambda row, _: row.bar),
    Column("result", lambda row, _: row.result),
    Column("more", lambda row, _: row.more),
]
WEIGHTS_MB = Column("weights MB", lambda row, _: f"{row.info.weight_bytes / 1e6:.0f}")
PEAK_MB = Column("peak MB", lambda row, _: _megabytes(row.peak_bytes))
VERSION = Column("version", lambda row, _: str(row.info.version))
PERPLEXITY = Column("perplexity", lambda row, _: number(perplexity(row), 3))
KLD = Column("KLD", lambda row, _: number(kld(row), 4))


def speed(workload: str, name: str = "") -> Column:
    """Tokens a second, the best of all rounds."""
    return Column(name or workload, lambda row, _: number(row.speed(workload), 0))


def speedup(workload: str, name: str = "first / this") -> Column:
    """The first entry's speed, in multiples of this one's."""
    return Column(
        name, lambda row, results: number(results[0].speed(workload) / row.speed(workload))
    )


def number(value: float, digits: int = 2) -> str:
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def numbers(values: Sequence[float], digits: int = 2) -> str:
    return " ".join(number(value, digits) for value in values)


def _megabytes(num_bytes: int | None) -> str:
    return "–" if num_bytes is None else f"{num_bytes / 1e6:.0f}"


def perplexity(row: Measured) -> float:
    """NaN if it wasn't measured."""
    return math.exp(_mean_score(row, "nll"))


def kld(row: Measured) -> float:
    """The mean KL divergence from the reference, in nats; NaN if it wasn't measured."""
    return _mean_score(row, "kld")


def _mean_score(row: Measured, name: str) -> float:
    score = row.last("score") if "score" in row.turns else {}
    total = score.get(name)
    return math.nan if total is None else float(total) / score["num_tokens"]


def run_and_report(
    experiment: Experiment, out: Path | None = None, resume: bool = False
) -> list[Measured]:
    """Prints the table, writes files to `out`, and raises if the experiment found problems.
    `resume`: what `out` has of the same commit isn't measured again."""
    if out is None:
        results = run_experiment(experiment)
    else:
        earlier = read_results(out / f"{experiment.name}.json") if resume else []
        results = run_experiment(
            experiment, earlier, lambda results: write_results(experiment, results, out)
        )
    cells = table_cells(experiment, results)
    shown = rich_table(experiment, cells)
    width = None if Console().is_terminal else 30 + 14 * len(shown.columns)
    console = Console(highlight=False, width=width)
    console.print(shown)
    for note in experiment.notes(results):
        console.print(note)
    if out is not None:
        write(experiment, results, out)
        console.print(f"{experiment.name}.json, .md and .png are in {out}")
    problems = experiment.problems(results)
    if problems:
        raise LoadtestError("; ".join(problems))
    return results


def table_cells(experiment: Experiment, results: Results) -> list[list[str]]:
    rows = experiment.rows(results)
    return [[column.cell(row, results) for column in experiment.columns] for row in rows]


def rich_table(experiment: Experiment, cells: Sequence[Sequence[str]]) -> Table:
    table = Table(title=experiment.title, box=box.SIMPLE_HEAD)
    for index, column in enumerate(experiment.columns):
        justify, widths = "right" if index else "left", map(len, column.name.split())
        table.add_column(
            column.name,
            justify=justify,  # type: ignore[arg-type]
            no_wrap=not index,
            min_width=max(widths, default=None),
        )
    for row in cells:
        table.add_row(*row)
    return table


def markdown(experiment: Experiment, results: Results, info: Mapping[str, str]) -> str:
    heading = [column.name for column in experiment.columns]
    rule = ["---", *["---:"] * (len(heading) - 1)]
    lines = [heading, rule, *table_cells(experiment, results)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    listed = "\n".join(f"- {name}: {value}" for name, value in info.items())
    notes = "".join(f"\n{note}\n" for note in experiment.notes(results))
    return f"{text}\n{notes}\n{listed}\n"


def write(experiment: Experiment, results: Results, out: Path) -> None:
    """NAME.json, NAME.md and, where backends have speeds, NAME.png in a directory."""
    write_results(experiment, results, out)
    stem = out / experiment.name
    text = markdown(experiment, results, machine_info())
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    plot(experiment, results, stem.with_suffix(".png"))


def write_results(experiment: Experiment, results: Results, out: Path) -> None:
    """NAME.json alone: all that the rest is made of."""
    out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"info": machine_info(), "title": experiment.title}
    record["results"] = [asdict(each) for each in results]
    path = out / f"{experiment.name}.json"
    path.write_text(json.dumps(record, indent=1), encoding="utf-8")


def read_results(path: Path) -> list[Measured]:
    """Of this commit; none if the file isn't there."""
    if not path.exists():
        return []
    record = json.loads(path.read_text(encoding="utf-8"))
    there, here = record["info"]["commit"], machine_info()["commit"]
    if there != here:
        raise OptionError(f"{path} was measured at commit {there}, and this is {here}")
    return [Measured(**each | {"info": BackendInfo(**each["info"])}) for each in record["results"]]


def plot(experiment: Experiment, results: Results, path: Path) -> None:
    """A group of bars for each workload, relative to its fastest backend."""
    from matplotlib.figure import Figure

    names = [each.name for each in experiment.workloads if not each.once]
    turns = {name: [each.turns.get(name, [{}])[0] for each in results] for name in names}
    names = [name for name in names if all({"seconds", "num_tokens"} <= {*t} for t in turns[name])]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(results)
    for index, result in enumerate(results):
        places = [i + (index - (len(results) - 1) / 2) * width for i in range(len(names))]
        best = [max(each.speed(name) for each in results) for name in names]
        axes.bar(
            places,
            [result.speed(name) / most for name, most in zip(names, best, strict=True)],
            width,
            label=f"{result.label} ({number(perplexity(result), 3)})",
            color=COLOURS[index % len(COLOURS)],
            hatch=HATCHES[index // len(COLOURS) % len(HATCHES)],
            edgecolor="white",
            linewidth=0.3,
        )
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("tokens/s, as a share of the fastest")
    axes.set_title("Speed by workload; in brackets the perplexity on the same held-out tokens")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
