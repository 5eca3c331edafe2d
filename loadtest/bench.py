"""`quill bench engine` and `quill bench peers`: who makes how many tokens a second, and how well.

Knows: where contenders are found and what they need. Does not know: how they work.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from quill.export.bundle.manifest import MANIFEST_FILE, Manifest, read_manifest
from quill.export.operators.library import operators_problem
from quill.export.precisions import PRECISIONS
from quill.loadtest.bench_report import table, write
from quill.loadtest.bench_tasks import (
    PEER_ROWS,
    decode_tasks,
    engine_tasks,
    prefill_tasks,
    random_ids,
)
from quill.loadtest.contest import ROOT, Result, Task, contest
from quill.loadtest.errors import ContenderError, OptionError
from quill.loadtest.machine import machine_facts, num_cores
from quill.server.serve.default_model import NAME as MODEL
from quill.server.serve.default_model import cache_directory

OWN = [name for name, facts in PRECISIONS.items() if facts.needs_operators]
MAX_IDS = 600
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
PASSAGES = "passages.json"


def run_engine(args: argparse.Namespace) -> None:
    bundle = args.bundle or default_bundle()
    manifest = read_manifest(bundle)
    sizes = manifest.sizes
    ids = random_ids(MAX_IDS, sizes.vocab_size)
    commands = _quill_commands(bundle, manifest, args)
    _run(args, commands, engine_tasks(ids, min(sizes.context, 1024)), [])


def run_peers(args: argparse.Namespace) -> None:
    if not PEERS_PYTHON.exists():
        raise OptionError("the peers aren't installed. Run `make peers` first; it takes minutes")
    cache = cache_directory()
    passages = held_out(cache)
    prepare_peers(cache)
    ids = [token for passage in passages for token in passage][:MAX_IDS]
    tasks = [*prefill_tasks(ids, MAX_IDS), *decode_tasks(ids, PEER_ROWS)]
    bundle = args.bundle or default_bundle()
    commands = _quill_commands(bundle, read_manifest(bundle), args)
    commands += peer_commands(cache, args.threads or num_cores())
    _run(args, commands, tasks, passages[: args.passages])


def _run(
    args: argparse.Namespace,
    commands: Sequence[Sequence[str]],
    tasks: Sequence[Task],
    passages: Sequence[Sequence[int]],
) -> list[Result]:
    console = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory() as logs:
        results = contest(
            commands, tasks, passages, Path(logs), args.rounds, lambda text: console.print(text)
        )
    shown = table(results)
    Console(highlight=False, width=20 + 11 * len(shown.columns)).print(shown)
    if args.out is not None:
        write(results, machine_facts(), args.out)
        console.print(f"results.json, results.md and speeds.png are in {args.out}")
    return results


def _quill_commands(bundle: Path, manifest: Manifest, args: argparse.Namespace) -> list[list[str]]:
    on_cpu: list[str] = [each.precision for each in manifest.graphs if each.device == "cpu"]
    problem = operators_problem()
    own = [each for each in on_cpu if each in OWN]
    if problem is not None and own and not args.precision:
        Console(stderr=True).print(f"Without {', '.join(own)}: {problem}", highlight=False)
        on_cpu = [each for each in on_cpu if each not in OWN]
    wanted = args.precision.split(",") if args.precision else on_cpu
    command = [sys.executable, "-m", "quill.loadtest.contender_quill", str(bundle)]
    return [[*command, each, str(args.threads or num_cores())] for each in wanted]


def peer_commands(cache: Path, num_threads: int) -> list[list[str]]:
    """Each with the kinds of weights that it is known for."""
    peers = cache / "peers"
    files = {
        "peer_llama": {
            "Q8_0": peers / "q8_0.gguf",
            "Q4_1": gguf(cache),
            "Q4_0": peers / "q4_0.gguf",
        },
        "peer_genai": {kind: peers / f"genai-{kind}" for kind in ("int4", "int8", "fp32")},
        "peer_ctranslate2": {kind: peers / f"ct2-{kind}" for kind in ("int8", "float32")},
        "peer_transformers": {"float32": peers / "hf"},
    }
    return [
        [str(PEERS_PYTHON), "-m", f"quill.loadtest.{module}", str(path), kind, str(num_threads)]
        for module, kinds in files.items()
        for kind, path in kinds.items()
    ]


def prepare_peers(cache: Path) -> None:
    tokenizer = default_bundle() / "tokenizer.json"
    arguments = ["quill.loadtest.peers_prepare", gguf(cache), tokenizer, cache / "peers"]
    _check(subprocess.run([PEERS_PYTHON, "-m", *map(str, arguments)], cwd=ROOT, check=False))


def held_out(cache: Path) -> list[list[int]]:
    """The passages that export measures perplexity on, made once."""
    path = cache / "peers" / PASSAGES
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
        raise ContenderError(f"`{command}` failed with code {done.returncode}; see above")


def gguf(cache: Path) -> Path:
    """The file that `quill import smollm2-135m` fetched."""
    found = sorted(cache.glob("*SmolLM2-135M*.gguf"))
    if not found:
        raise OptionError(f"{cache} has no SmolLM2 yet. Run `quill import {MODEL}` first")
    return found[0]


def default_bundle() -> Path:
    bundle = cache_directory() / "bundles" / MODEL
    if not (bundle / MANIFEST_FILE).exists():
        raise OptionError(f"there is no bundle at {bundle}. Run `make serve` once, or name another")
    return bundle
