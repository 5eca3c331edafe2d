"""`quill export`: from any source to a bundle, with progress and a closing table.

Knows: the command's arguments and output. Does not know: the cache (export/cli/cached.py), how
graphs are made or verified.
"""

import argparse
import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from quill.export.bundle.manifest import Graphs, Manifest, read_manifest
from quill.export.cli.cached import parse_precisions
from quill.export.errors import ExportError
from quill.export.exportability import Problem, exportability
from quill.export.operators.library import kernels, library_path, operators_are_fast
from quill.export.pipeline import ExportOptions, check_existing, write_bundle
from quill.export.precisions import ALL_PRECISIONS, preferred
from quill.export.verify.verifier import Tick
from quill.model.importers.import_weights import open_checkpoint
from quill.model.network.config import ModelConfig
from quill.model.progress import Display
from quill.model.sources.kinds import Source


def export(source: Source, out: Path, args: argparse.Namespace, name: str | None = None) -> None:
    """`args`: the command's. `name`: of a model whose source has none, if not that of `out`."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    existing = read_manifest(out).precisions if args.add else ()
    checkpoint = open_checkpoint(source)
    if name is not None:
        provenance = {"name": name} | checkpoint.provenance
        checkpoint = replace(checkpoint, provenance=provenance)
    options = ExportOptions(precisions=(), verify=args.verify, text=args.text, add=args.add)
    options = with_precisions(options, args.precision, checkpoint.config, existing, console)
    if not options.precisions:
        check_existing(out, checkpoint)
        console.print(f"Nothing to add: {out} has {', '.join(existing)}")
        return
    manifest = write_bundle(out, checkpoint, options, stage, console.print)
    _warn(console, manifest)
    # Into the cache, the only line on stdout is where the bundle is.
    Console(stderr=name is not None, highlight=False).print(summary(manifest))


@contextlib.contextmanager
def stage(title: str, total: int | None = None) -> Iterator[Tick]:
    """Displays one stage of the export, and prints its time at the end."""
    start = time.monotonic()
    with Display(title, total, transient=True) as display:
        yield display.advance
        display.print(f"{title}: {time.monotonic() - start:.0f} s")


def with_precisions(
    options: ExportOptions,
    wanted: str | None,
    config: ModelConfig,
    existing: tuple[str, ...],
    console: Console,
) -> ExportOptions:
    """The requested precisions that the bundle lacks; by default what a server here chooses."""
    found = {name: exportability(config, name, verify=options.verify) for name in ALL_PRECISIONS}
    problems = {name: problem for name, problem in found.items() if problem is not None}
    if wanted is not None and wanted.strip() != "all":
        precisions = parse_precisions(wanted)
        for name in precisions:
            if name in problems:
                raise _error(f"{name} can't", problems[name])
        return replace(options, precisions=tuple(p for p in precisions if p not in existing))
    if "fp32" in problems:  # it has the fewest conditions
        raise _error("nothing can", problems["fp32"])
    if wanted is not None:
        for name, problem in problems.items():
            console.print(f"Leaving {name} out: {problem.reason}")
        possible = [name for name in ALL_PRECISIONS if name not in problems]
        missing = tuple(name for name in possible if name not in existing)
        return replace(options, precisions=missing, keep="verified")
    ideal = preferred(config.family, fast_operators=True)[0]
    order = preferred(config.family, fast_operators=operators_are_fast())
    possible = [name for name in order if name not in problems]
    better = tuple(possible[: next((i for i, p in enumerate(possible) if p in existing), None)])
    if better:
        why = _why_fastest()
        if ideal in problems:
            why = f"{ideal} can't be exported: {problems[ideal].reason}"
        console.print(f"Exporting {better[0]}, which a server on this machine chooses ({why})")
    return replace(options, precisions=better, keep="best")


def _why_fastest() -> str:
    if operators_are_fast():
        return f"the fastest that is good enough, with Quill's {kernels(library_path())} kernels"
    return "Quill's custom operators have no fast kernels for this processor"


def _error(what: str, problem: Problem) -> ExportError:
    return problem.error(f"{what} be exported here: {problem.reason}")


def _warn(console: Console, manifest: Manifest) -> None:
    for graphs in manifest.graphs:
        if problem := graphs.quality_problem:
            console.print(
                f"[bold]Warning:[/] {graphs.precision}: {problem}. A server has to be asked for it."
            )
        if graphs.invariance is not None and not graphs.invariance.holds:
            console.print(
                f"[bold]Warning:[/] with ONNX Runtime {manifest.onnxruntime} the {graphs.precision}"
                " graph isn't batch-invariant: its output for a request depends on what else is in "
                "the batch. The server can't promise the same tokens for the same seed with it."
            )


def summary(manifest: Manifest) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in ("file", "precision"):
        table.add_column(column, no_wrap=True)
    for column in ("MB", "KL divergence", "perplexity", "ms a step"):
        table.add_column(column, justify="right", no_wrap=True)
    sizes = {file.name: file.size for file in manifest.files}
    for graphs in manifest.graphs:
        names = graphs.file_names
        megabytes = "\n".join(f"{sizes[name] / 1e6:.2f}" for name in names)
        table.add_row("\n".join(names), graphs.precision, megabytes, *_measured(graphs))
    return table


def _measured(graphs: Graphs) -> tuple[str, str, str]:
    found = graphs.verification
    if found is None:
        return "not verified", "", ""
    rise = found.perplexity / found.reference_perplexity - 1
    return (
        "" if found.kl_divergence is None else f"{found.kl_divergence:.5f}",
        f"{found.perplexity:.4f} ({rise:+.2%})",
        f"{found.step_ms:.1f}",
    )
