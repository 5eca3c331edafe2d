"""`quill export`: from a checkpoint's directory to a bundle's, with progress and a closing table.

Knows: the command's arguments, what a person sees. Does not know: how any of it is done.
"""

import argparse
import contextlib
import time
from collections.abc import Iterator
from typing import get_args

from rich import box
from rich.console import Console
from rich.table import Table

from export.bundle import Wishes, write_bundle
from export.errors import ExportError, UnsupportedModelError
from export.manifest import Graphs, Manifest, Precision
from export.operator_library import operators_problem
from export.quantisation import check_quantisable
from model.checkpoint import load_checkpoint
from model.config import ModelConfig
from model.training_state import resolve_checkpoint

ALL_PRECISIONS: tuple[Precision, ...] = get_args(Precision)
QUANTISED = ("int4", "int8", "quill4")


def run(args: argparse.Namespace) -> None:
    console = Console(stderr=True)
    checkpoint = load_checkpoint(resolve_checkpoint(args.checkpoint))
    wishes = Wishes(
        precisions=_precisions(args.precision, args.verify, checkpoint.config, console),
        quantiser=args.quantiser,
        optional=("int8", "quill4") if args.precision is None else (),
        verify=args.verify,
        text=args.text,
    )
    stages = Stages(console, num_stages(wishes))
    manifest = write_bundle(args.out, checkpoint, wishes, stages, console.print)
    _warn(console, manifest)
    console = Console(highlight=False)
    console.print(summary(manifest))
    console.print(f"{manifest.name} is in {args.out}")


def _precisions(
    wanted: str | None, verify: bool, config: ModelConfig, console: Console
) -> tuple[Precision, ...]:
    problem = operators_problem() if verify else None
    if wanted is not None:
        precisions = parse_precisions(wanted)
        if problem is not None and "quill4" in precisions:
            raise ExportError(f"quill4 can't be verified: {problem}")
        return precisions
    try:
        check_quantisable(config)
    except UnsupportedModelError as error:
        console.print(f"Leaving {', '.join(QUANTISED)} out: {error}")
        return tuple(name for name in ALL_PRECISIONS if name not in QUANTISED)
    if problem is not None:
        console.print(f"Leaving quill4 out: {problem}")
        return tuple(name for name in ALL_PRECISIONS if name != "quill4")
    return ALL_PRECISIONS


def parse_precisions(wanted: str) -> tuple[Precision, ...]:
    names = [name.strip() for name in wanted.split(",")]
    for name in names:
        if name not in ALL_PRECISIONS:
            raise ExportError(f"unknown precision {name!r}; there are {', '.join(ALL_PRECISIONS)}")
    return tuple(precision for precision in ALL_PRECISIONS if precision in names)


def num_stages(wishes: Wishes) -> int:
    """As write_bundle goes through them: PyTorch's answers first, if they are needed."""
    num = len(wishes.precisions)
    return 1 + 2 * num if wishes.verify else num


class Stages:
    """Says which stage begins, shows that it goes on, and leaves a line with its time behind."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._num_begun = 0

    @contextlib.contextmanager
    def __call__(self, title: str) -> Iterator[None]:
        self._num_begun += 1
        title = f"({self._num_begun}/{self._total}) {title}"
        start = time.monotonic()
        if not self._console.is_terminal:  # which would show a spinner
            self._console.print(f"{title} …", highlight=False)
        with self._console.status(f"{title} …"):
            yield
        self._console.print(f"{title}: {time.monotonic() - start:.0f} s", highlight=False)


def _warn(console: Console, manifest: Manifest) -> None:
    for graphs in manifest.graphs:
        if graphs.invariance is not None and not graphs.invariance.holds:
            console.print(
                f"[bold]Warning:[/] with ONNX Runtime {manifest.onnxruntime} the {graphs.precision}"
                " graph's answers to a request depend on what else runs beside it. The server "
                "can't promise the same tokens for the same seed with it.",
                highlight=False,
            )


def summary(manifest: Manifest) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in ("file", "precision"):
        table.add_column(column, no_wrap=True)
    for column in ("MB", "worst diff.", "perplexity", "ms a step"):
        table.add_column(column, justify="right", no_wrap=True)
    sizes = {file.name: file.size for file in manifest.files}
    for graphs in manifest.graphs:
        names = [name for name in (graphs.decoder, graphs.encoder, graphs.weights) if name]
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
