"""`quill bench cluster`: what Ray and HAProxy cost, against plain servers that users ask in turn.

Knows: `quill serve`, `quill cluster up`, closed-loop users. Does not know: Ray.

As many servers as replicas, with as many threads, on the same machine; the same users ask one and
then the other, round after round.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from quill.export.bundle.manifest import read_manifest
from quill.loadtest.bench.contest import PAUSE_S
from quill.loadtest.bench.models import default_bundle
from quill.loadtest.bench.tasks import random_ids
from quill.loadtest.environment.machine import machine_facts
from quill.loadtest.environment.own_cluster import own_cluster
from quill.loadtest.environment.own_server import own_server
from quill.loadtest.workload.closed_loop import closed_loop
from quill.server.client.sync_client import Client

BAR = 0.9
NUM_PROMPTS, PROMPT_TOKENS = 64, 32
PLAIN, RAY = "plain gRPC, in turn", "Ray, HAProxy"


def run(args: argparse.Namespace) -> None:
    bundle = args.bundle or default_bundle()
    ids = random_ids(NUM_PROMPTS + PROMPT_TOKENS, read_manifest(bundle).sizes.vocab_size)
    prompts = [ids[start : start + PROMPT_TOKENS] for start in range(NUM_PROMPTS)]
    # Neither cache nor guesses: every round has the same work.
    options = [
        "--threads",
        str(args.threads or 1),
        "--max-num-seqs",
        str(args.users),
        "--kv-cache-mb",
        "512",
    ]
    options += ["--no-prefix-cache", "--no-speculative", "--no-spinning"]
    rates: dict[str, list[float]] = {PLAIN: [], RAY: []}
    with tempfile.TemporaryDirectory() as logs, ExitStack() as stack:
        _say(f"starting {args.replicas} servers and a cluster of {args.replicas} replicas")
        servers = [
            stack.enter_context(own_server(Path(logs) / f"server-{number}.log", bundle, *options))
            for number in range(args.replicas)
        ]
        replicas = ["--replicas", str(args.replicas), *options]
        cluster = stack.enter_context(own_cluster(Path(logs) / "cluster.log", bundle, *replicas))
        sides = {PLAIN: [server.address for server in servers], RAY: [cluster]}
        for number in range(args.rounds):
            for name, addresses in sides.items():
                time.sleep(PAUSE_S)
                rate = _rate(addresses, prompts, args)
                rates[name].append(rate)
                _say(f"round {number + 1} of {args.rounds}: {name}: {rate:.0f} tokens/s")
    Console(highlight=False).print(_table(rates, args))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        record = {"facts": machine_facts(), "bundle": bundle.name, "rates": rates}
        (args.out / "cluster.json").write_text(json.dumps(record, indent=1), encoding="utf-8")


def _rate(
    addresses: Sequence[str], prompts: Sequence[Sequence[int]], args: argparse.Namespace
) -> float:
    """Streamed tokens a second."""
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(address)) for address in addresses]
        turns = itertools.cycle(clients)

        def ask(prompt: Sequence[int]) -> int:
            answer = next(turns).stream(
                prompt, max_new_tokens=args.answer, temperature=0.0, ignore_eos=True
            )
            return sum(len(chunk.token_ids) for chunk in answer)

        return closed_loop(ask, prompts, args.users, args.duration).tokens_a_second


def _table(rates: dict[str, list[float]], args: argparse.Namespace) -> Table:
    title = f"{args.replicas} × {args.threads or 1} threads, {args.users} streams"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for name in ("", "tokens/s, best", "all rounds"):
        table.add_column(name, justify="left" if not name else "right")
    for name, each in rates.items():
        table.add_row(name, f"{max(each):.0f}", " ".join(f"{rate:.0f}" for rate in each))
    ratios = [ray / plain for ray, plain in zip(rates[RAY], rates[PLAIN], strict=True)]
    ratio = max(rates[RAY]) / max(rates[PLAIN])
    seen = f"{ratio:.2f} (bar: ≥ {BAR:g})"
    table.add_row("ratio", seen, " ".join(f"{each:.2f}" for each in ratios))
    return table


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
