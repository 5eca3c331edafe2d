"""Quill's engine under test, of this checkout and of others, and its bundles.

Does not know: workloads, speeds, other programs (bench/peers.py).
"""

import argparse
import sys
from pathlib import Path

from quill.loadtest.bench.experiment import Entry
from quill.loadtest.environment.process import num_cores
from quill.loadtest.errors import OptionError
from quill.server.serve.prepare import prepared_bundle

BACKENDS = "quill.loadtest.bench.backends"


def engine_entries(
    args: argparse.Namespace, bundle: Path, precisions: list[str], *more: str
) -> list[Entry]:
    """Quill's engine in each precision; of other checkouts, too, where --against names them."""
    entries = []
    for precision in precisions:
        words = ["-m", f"{BACKENDS}.quill_engine", str(bundle), precision, num_threads(args), *more]
        entries.append(Entry([sys.executable, *words]))
        for checkout in getattr(args, "against", None) or ():
            label = f"Quill {precision}, {checkout.name}"
            entries.append(Entry([checkout_python(checkout), *words], label))
    return entries


def checkout_python(checkout: Path) -> str:
    """The Python of another checkout's virtual environment."""
    python = checkout.absolute() / ".venv" / "bin" / "python"
    if not python.exists():
        raise OptionError(f"there is no {python}. Run `make .venv/base` in {checkout}")
    return str(python)


def num_threads(args: argparse.Namespace) -> str:
    return str(args.threads or num_cores())


def bundle_of(source: str | None, precisions: str | None = None) -> Path:
    """Of any source that `quill serve` takes; by default of the default model."""
    return prepared_bundle(source, "cpu", precisions)
