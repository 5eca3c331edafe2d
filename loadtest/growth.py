"""`quill bench growth`: how a decode step's time grows, as three plots.

Knows: what export/growth.py prints. Does not know: how it is measured.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.bench import default_bundle
from loadtest.bench_report import COLOURS
from loadtest.contest import ROOT
from loadtest.errors import ContenderError
from loadtest.machine import machine_facts

MARKERS = ("o", "s", "^")
Points = Sequence[Sequence[float]]


def run(args: argparse.Namespace) -> None:
    bundle = args.bundle or default_bundle()
    command = [sys.executable, "-m", "export.growth", str(bundle), args.precision]
    if args.vocabularies:
        command += ["--vocabularies", args.vocabularies]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise ContenderError(f"`{' '.join(command)}` failed with code {done.returncode}; see above")
    record: dict[str, Any] = json.loads(done.stdout)
    args.out.mkdir(parents=True, exist_ok=True)
    told = json.dumps({"facts": machine_facts(), "precision": args.precision} | record, indent=1)
    (args.out / "growth.json").write_text(told, encoding="utf-8")
    plots(record, args.out)
    print(f"growth.json and growth-*.png are in {args.out}")


def plots(record: Mapping[str, Any], out: Path) -> None:
    by_rows = {_named(rows): points for rows, points in record["context"].items()}
    _plot(by_rows, "tokens in each row before the step", out / "growth-context.png")
    _plot({"one step": record["rows"]}, "rows in the step", out / "growth-rows.png")
    by_rows = {_named(rows): points for rows, points in record["vocabulary"].items()}
    _plot(by_rows, "tokens in the vocabulary", out / "growth-vocabulary.png")


def _named(num_rows: str) -> str:
    return "1 row" if num_rows == "1" else f"{num_rows} rows"


def _plot(series: Mapping[str, Points], what: str, path: Path) -> None:
    """With a straight line through the first and the last point, to see where it bends."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for index, (name, points) in enumerate(series.items()):
        sizes, times_ms = zip(*points, strict=True)
        colour = COLOURS[index]
        axes.plot(sizes, times_ms, color=colour, marker=MARKERS[index], label=name)
        ends = ([sizes[0], sizes[-1]], [times_ms[0], times_ms[-1]])
        axes.plot(*ends, color=colour, linestyle=":", linewidth=1)
    axes.set_xlabel(what)
    axes.set_ylabel("milliseconds a step")
    axes.set_ylim(bottom=0)
    axes.set_title("A decode step's time (dotted: a straight line)")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
