"""`quill bench engine` and `quill bench peers`: who makes how many tokens a second, and how well.

Knows: where contenders are found and what they need. Does not know: how they work.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from quill.cache import cache_directory
from quill.export.bundle.manifest import Manifest, read_manifest
from quill.loadtest.bench.contest import Result, Task, contest
from quill.loadtest.bench.models import (
    PEERS_PYTHON,
    default_bundle,
    held_out,
    peer_commands,
    prepare_peers,
)
from quill.loadtest.bench.report import table, write
from quill.loadtest.bench.tasks import (
    LONG_PREFILLS,
    PEER_ROWS,
    decode_tasks,
    engine_tasks,
    prefill_tasks,
    random_ids,
)
from quill.loadtest.environment.machine import machine_facts, num_cores
from quill.loadtest.errors import OptionError

MAX_IDS = 600


def run_engine(args: argparse.Namespace) -> None:
    bundle = args.bundle or default_bundle()
    manifest = read_manifest(bundle)
    sizes = manifest.sizes
    commands = _quill_commands(bundle, manifest, args)
    if args.long:
        ids = random_ids(LONG_PREFILLS[-1] + 1, sizes.vocab_size)
        tasks = prefill_tasks(ids, sizes.context, LONG_PREFILLS)
    else:
        tasks = engine_tasks(random_ids(MAX_IDS, sizes.vocab_size), min(sizes.context, 1024))
    _run(args, commands, tasks, [])


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
    wanted = args.precision.split(",") if args.precision else on_cpu
    command = [sys.executable, "-m", "quill.loadtest.bench.contenders.quill", str(bundle)]
    return [[*command, each, str(args.threads or num_cores())] for each in wanted]
