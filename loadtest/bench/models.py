"""Where the models and programs under test are, and how the peers' models are made.

Knows: the cache, the peers' environment, other checkouts. Does not know: workloads, speeds.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from quill.loadtest.bench.experiment import Entry
from quill.loadtest.environment.process import ROOT, num_cores
from quill.loadtest.errors import BackendError, OptionError
from quill.model.sources.catalogue import DEFAULT as MODEL
from quill.server.serve.prepare import prepared_bundle

PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
LLAMA_SERVER = PEERS_PYTHON.with_name("llama-server")
BACKENDS = "quill.loadtest.bench.backends"
# A peer's module, and its file in the peers' cache for each kind of weights.
PEERS = {
    "llama_cpp": {"Q8_0": "q8_0.gguf", "Q4_1": "", "Q4_0": "q4_0.gguf"},  # "": the GGUF itself
    "genai": {kind: f"genai-{kind}" for kind in ("int4", "int8", "fp32")},
    "ctranslate2": {kind: f"ct2-{kind}" for kind in ("int8", "float32")},
    "transformers": {"float32": "hf"},
}


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


def peer_entry(module: str, *arguments: str, python: Path | None = None) -> Entry:
    """A backend in the peers' environment, or in that of `python`."""
    if python is None and not PEERS_PYTHON.exists():
        raise OptionError("the peers aren't installed. Run `make peers` first; it takes minutes")
    return Entry([str(python or PEERS_PYTHON), "-m", f"{BACKENDS}.{module}", *arguments])


def peer_entries(cache: Path, threads: str) -> list[Entry]:
    return [
        peer_entry(module, str(cache / "peers" / file if file else gguf(cache)), kind, threads)
        for module, kinds in PEERS.items()
        for kind, file in kinds.items()
    ]


def prepare_peers(cache: Path) -> None:
    tokenizer = bundle_of(None) / "tokenizer.json"
    arguments = [f"{BACKENDS}.prepare", gguf(cache), tokenizer, cache / "peers"]
    _check(subprocess.run([PEERS_PYTHON, "-m", *map(str, arguments)], cwd=ROOT, check=False))


def held_out(cache: Path) -> list[list[int]]:
    """The passages on which export measures perplexity, made once."""
    path = cache / "peers" / "passages.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "quill.export.cli.passages", MODEL]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
        _check(done)
        path.write_bytes(done.stdout)
    passages: list[list[int]] = json.loads(path.read_text(encoding="utf-8"))["passages"]
    return passages


def _check(done: "subprocess.CompletedProcess[bytes]") -> None:
    if done.returncode != 0:
        command = " ".join(map(str, done.args))
        raise BackendError(f"`{command}` failed with code {done.returncode}; see above")


def gguf(cache: Path) -> Path:
    """The file that `quill serve` fetched."""
    found = sorted((cache / "models" / MODEL).glob("*.gguf"))
    if not found:
        raise OptionError(f"{cache} has no SmolLM2 yet. Run `quill import {MODEL}` first")
    return found[0]


def bundle_of(source: str | None, precisions: str | None = None) -> Path:
    """Of any source that `quill serve` takes; by default of the default model."""
    return prepared_bundle(source, "cpu", precisions)
