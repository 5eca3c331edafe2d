"""`quill export`: from a checkpoint to a bundle's directory, with progress and a closing table.

Knows: the command's arguments, what a person sees. Does not know: how any of it is done.
"""

import argparse
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.table import Table

from quill.export.bundle.manifest import Graphs, Manifest, read_manifest
from quill.export.cli.stages import Stages
from quill.export.errors import ExportError, UnsupportedModelError
from quill.export.operators.library import (
    kernels,
    library_path,
    operators_are_fast,
    operators_problem,
)
from quill.export.pipeline import Wishes, check_standing, shape_problem, write_bundle
from quill.export.precisions import ALL_PRECISIONS, PRECISIONS, Precision, preferred
from quill.export.quantize.quantization import check_quantizable
from quill.model.importers.import_weights import open_checkpoint
from quill.model.network.config import ModelConfig


def run(args: argparse.Namespace) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    standing = read_manifest(args.out).precisions if args.add else ()
    checkpoint = open_checkpoint(args.checkpoint)
    wishes = Wishes(precisions=(), verify=args.verify, text=args.text, add=args.add)
    wishes = with_precisions(wishes, args.precision, checkpoint.config, standing, console)
    if not wishes.precisions:
        check_standing(args.out, checkpoint)
        console.print(f"Nothing to add: {args.out} has {', '.join(standing)}")
        return
    manifest = write_bundle(args.out, checkpoint, wishes, Stages(console), console.print)
    _warn(console, manifest)
    console = Console(highlight=False)
    console.print(summary(manifest))
    console.print(f"{manifest.name} is in {args.out}")


def with_precisions(
    wishes: Wishes,
    wanted: str | None,
    config: ModelConfig,
    standing: tuple[str, ...],
    console: Console,
) -> Wishes:
    """What was asked for and isn't there yet. If nothing was: what a server here would take."""
    problems = _problems(config, wishes.verify)
    if wanted is not None and wanted.strip() != "all":
        precisions = parse_precisions(wanted)
        for name in precisions:
            if name in problems:
                raise ExportError(f"{name} can't be exported here: {problems[name]}")
        return replace(wishes, precisions=tuple(p for p in precisions if p not in standing))
    if "fp32" in problems:  # the plainest
        raise ExportError(f"nothing can be exported here: {problems['fp32']}")
    if wanted is not None:
        for name, problem in problems.items():
            console.print(f"Leaving {name} out: {problem}")
        possible = [name for name in ALL_PRECISIONS if name not in problems]
        missing = tuple(name for name in possible if name not in standing)
        return replace(wishes, precisions=missing, keep="proven")
    ideal = preferred(config.family, fast_operators=True)[0]
    order = preferred(config.family, fast_operators=operators_are_fast())
    possible = [name for name in order if name not in problems]
    better = tuple(possible[: next((i for i, p in enumerate(possible) if p in standing), None)])
    if better:
        why = f"{ideal} can't be had: {problems[ideal]}" if ideal in problems else _why_fastest()
        console.print(f"Exporting {better[0]}, which a server takes here ({why})")
    return replace(wishes, precisions=better, keep="best")


def _why_fastest() -> str:
    if operators_are_fast():
        return f"the fastest that is good enough, with Quill's {kernels(library_path())} kernels"
    return "Quill's own operators have no fast kernels for this processor"


def _problems(config: ModelConfig, verify: bool) -> dict[Precision, str]:
    """Why precisions can't be had here, for this model."""
    operators = operators_problem() if verify else None
    try:
        check_quantizable(config)
        shape = None
    except UnsupportedModelError as error:
        shape = str(error)
    problems: dict[Precision, str] = {}
    for name, facts in PRECISIONS.items():
        blocks = shape if facts.is_quantized else None
        if problem := shape_problem(name, config) or blocks or operators:
            problems[name] = problem
    return problems


def parse_precisions(wanted: str) -> tuple[Precision, ...]:
    names = [name.strip() for name in wanted.split(",")]
    for name in names:
        if name not in ALL_PRECISIONS:
            known = ", ".join((*ALL_PRECISIONS, "all"))
            raise ExportError(f"unknown precision {name!r}; there are {known}")
    return tuple(precision for precision in ALL_PRECISIONS if precision in names)


def _warn(console: Console, manifest: Manifest) -> None:
    for graphs in manifest.graphs:
        if graphs.invariance is not None and not graphs.invariance.holds:
            console.print(
                f"[bold]Warning:[/] with ONNX Runtime {manifest.onnxruntime} the {graphs.precision}"
                " graph's answers to a request depend on what else is in the batch. The server "
                "can't promise the same tokens for the same seed with it."
            )


def summary(manifest: Manifest) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in ("file", "precision"):
        table.add_column(column, no_wrap=True)
    for column in ("MB", "worst diff.", "perplexity", "ms a step"):
        table.add_column(column, justify="right", no_wrap=True)
    sizes = {file.name: file.size for file in manifest.files}
    for graphs in manifest.graphs:
        names = graphs.own_files
        megabytes = "\n".join(f"{sizes[name] / 1e6:.2f}" for name in names)
        table.add_row("\n".join(names), graphs.precision, megabytes, *_measured(graphs))
    return table


def _measured(graphs: Graphs) -> tuple[str, str, str]:
    found = graphs.verification
    if found is None:
        return "not verified", "", ""
    rise = found.perplexity / found.reference_perplexity - 1
    return (
        f"{found.worst_difference:.1e}",
        f"{found.perplexity:.4f} ({rise:+.2%})",
        f"{found.step_ms:.1f}",
    )
