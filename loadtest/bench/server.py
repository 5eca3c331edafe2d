"""`quill bench server`, `cluster` and `streams`: servers with streaming clients.

Knows: prompts, workloads, columns, sizes of servers. Does not know: protocols, engines.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from quill.export.bundle.manifest import Manifest, read_manifest
from quill.loadtest.bench.backends.quill_server import ServerConfig
from quill.loadtest.bench.engine import PAST_TOKENS, random_ids
from quill.loadtest.bench.experiment import Column, Entry, Experiment, Results, Workload
from quill.loadtest.bench.models import (
    BACKENDS,
    bundle_of,
    checkout_python,
    engine_entries,
    num_threads,
)
from quill.loadtest.bench.peers import LLAMA_SERVER, make, peers_model
from quill.loadtest.bench.report import (
    BAR_COLUMNS,
    LABEL,
    PEAK_MB,
    BarRow,
    number,
    numbers,
    run_and_report,
    speed,
    speedup,
)
from quill.loadtest.errors import OptionError
from quill.loadtest.protocols.names import PROTOCOLS, TITLES
from quill.server.loading.choices import choose_graphs

PROMPT_LENGTHS = (16, 128)
NUM_LENGTHS = 64  # between the two
STRIDE = 37  # from one prompt's length to the next one's, so that neighbours differ
NUM_PROMPTS = 1024  # of a round: none comes twice unless it is long
WARM_UP_S = 1.0
LOAD = "load"
FIRST_TOKEN = Column("first token, s", lambda row, _: number(row.best(LOAD)["first_token_s"]))
REQUESTS = Column("requests", lambda row, _: str(row.best(LOAD)["num_requests"]))
ALL_ROUNDS = Column("all rounds", lambda row, _: numbers(row.speeds(LOAD), 0))


@dataclass(frozen=True, kw_only=True)
class ServerLoad:
    """Closed-loop users; the same for all servers."""

    num_users: int
    num_shared: int = 0  # tokens of the prefix that all prompts share
    num_new: int  # tokens of each answer
    context: int  # of one request at most, the shared prefix included
    temperature: float = 0.0
    duration_s: float

    def workload(self, vocab_size: int, num_rounds: int) -> Workload:
        """The first order is the warm-up's: all users send once, the shared prefix gets cached."""
        common = {"do": "load", "num_users": self.num_users, "num_new": self.num_new}
        common["temperature"] = self.temperature
        orders = [
            common | {"prompts": prompts, "duration_s": self.duration_s if i else WARM_UP_S}
            for i, prompts in enumerate(make_rounds(vocab_size, self, num_rounds + 1))
        ]
        return Workload(LOAD, orders)


def run_server(args: argparse.Namespace) -> None:
    bundle = bundle_of(args.bundle, getattr(args, "precision", None))
    load = read_load(args)
    manifest = read_manifest(bundle)
    expected = expected_bytes(manifest, args.precision, load)

    def notes(results: Results) -> list[str]:
        peak = results[0].peak_bytes or 0
        text = f"{peak / expected:.2f} of weights and KV caches ({expected / 1e6:.0f} MB)"
        return [f"{results[0].label}'s peak memory: {peak / 1e6:.0f} MB, {text}"]

    experiment = Experiment(
        "server",
        f"{load.num_users} users, tokens a second, best of all rounds",
        server_entries(args, bundle, manifest, load),
        [load.workload(manifest.sizes.vocab_size, args.rounds)],
        [LABEL, speed(LOAD, "tokens/s"), REQUESTS, FIRST_TOKEN, speedup(LOAD), PEAK_MB, ALL_ROUNDS],
        args.rounds,
        warm_up=True,
        notes=notes,
    )
    run_and_report(experiment, args.out)


def read_load(args: argparse.Namespace) -> ServerLoad:
    return ServerLoad(
        num_users=args.users,
        num_shared=args.shared_prefix,
        num_new=args.answer,
        context=args.shared_prefix + args.context,
        temperature=args.temperature,
        duration_s=args.duration,
    )


def server_entries(
    args: argparse.Namespace, bundle: Path, manifest: Manifest, load: ServerLoad
) -> list[Entry]:
    """This Quill's server and others', each over all protocols that are measured."""
    options = serve_options(load, args.precision, token_bytes(manifest, args.precision))
    here = ServerConfig(str(bundle), (*options, "--threads", num_threads(args)))
    servers = {"": here}
    for checkout in args.against:
        servers[f", {checkout.name}"] = replace(here, python=checkout_python(checkout))
    servers |= {f" at {address}": ServerConfig(address=address) for address in args.beside}
    entries = [
        Entry(config.command(), f"Quill over {TITLES[protocol]}{name}", {"protocol": protocol})
        for protocol in (PROTOCOLS if args.protocols else PROTOCOLS[:1])
        for name, config in servers.items()
    ]
    return entries + ([llama_entry(args, load)] if args.peers else [])


def llama_entry(args: argparse.Namespace, load: ServerLoad) -> Entry:
    if not LLAMA_SERVER.exists():
        raise OptionError(
            f"there is no {LLAMA_SERVER}. Run `make peers` first; it takes about 20 minutes"
        )
    model, file = peers_model(args.bundle), "q8_0.gguf"
    make(model, "", file)
    sizes = [num_threads(args), str(load.num_users), str(load.context)]
    command = [sys.executable, "-m", f"{BACKENDS}.llama_server", str(LLAMA_SERVER)]
    shared = ["shared"] if load.num_shared else []
    return Entry([*command, str(model.path(file)), *sizes, *shared])


def serve_options(load: ServerLoad, precision: str | None, token_bytes: int) -> list[str]:
    """A KV cache for all users at once and a quarter more, so that some of it stays cached."""
    num_tokens = load.num_shared + load.num_users * (load.context - load.num_shared)
    megabytes = math.ceil(1.25 * max(num_tokens, 2 * load.context) * token_bytes / 2**20)
    given = ["--max-num-seqs", str(load.num_users), "--context", str(load.context)]
    given += ["--kv-cache-mb", str(megabytes)]
    given += [] if load.num_shared else ["--no-prefix-cache"]
    return given + (["--precision", precision] if precision else [])


def token_bytes(manifest: Manifest, precision: str | None) -> int:
    """Of the KV cache; of the smallest precision that the server may choose."""
    graphs = [manifest.graphs_in(precision)] if precision else manifest.graphs
    return min(manifest.cache_bytes_per_token(each.cache_type) for each in graphs)


def expected_bytes(manifest: Manifest, precision: str | None, load: ServerLoad) -> int:
    """Weights, and the KV caches of all users without shared blocks."""
    graphs = choose_graphs(manifest, "cpu", precision).graphs
    weights = next(file.size for file in manifest.files if file.name == graphs.weights)
    a_token = manifest.cache_bytes_per_token(graphs.cache_type)
    return int(weights + load.num_users * load.context * a_token)


def make_rounds(vocab_size: int, load: ServerLoad, num_rounds: int) -> list[list[list[int]]]:
    """The prompts of each round: the shared prefix, and tails of which no two are the same."""
    ids = random_ids(load.num_shared + num_rounds * NUM_PROMPTS + PROMPT_LENGTHS[1], vocab_size)
    shared, ids = ids[: load.num_shared], ids[load.num_shared :]
    max_length = load.context - load.num_shared - load.num_new
    return [
        [shared + tail for tail in make_tails(ids[i * NUM_PROMPTS :], max_length)]
        for i in range(num_rounds)
    ]


def make_tails(ids: Sequence[int], max_length: int) -> list[list[int]]:
    shortest, longest = PROMPT_LENGTHS
    more = max(shortest, min(longest, max_length)) - shortest
    lengths = [
        shortest + more * (i * STRIDE % NUM_LENGTHS) // NUM_LENGTHS for i in range(NUM_PROMPTS)
    ]
    return [list(ids[i : i + length]) for i, length in enumerate(lengths)]


def run_cluster(args: argparse.Namespace) -> None:
    """As many plain servers as replicas, with as many threads, on the same machine."""
    bundle = bundle_of(args.bundle, getattr(args, "precision", None))
    options = ["--threads", str(args.threads or 1), "--max-num-seqs", str(args.users)]
    options += ["--kv-cache-mb", "512", "--no-prefix-cache", "--no-speculative", "--no-spinning"]
    plain = ServerConfig(str(bundle), tuple(options), num_servers=args.replicas)
    ray = replace(plain, options=("--replicas", str(args.replicas), *options), cluster=True)
    load = ServerLoad(
        num_users=args.users, num_new=args.answer, context=256, duration_s=args.duration
    )
    experiment = Experiment(
        "cluster",
        f"{args.replicas} × {args.threads or 1} threads, {args.users} streams",
        [Entry(plain.command(), "plain gRPC, in turns"), Entry(ray.command(), "Ray, HAProxy")],
        [load.workload(read_manifest(bundle).sizes.vocab_size, args.rounds)],
        [LABEL, speed(LOAD, "tokens/s"), speedup(LOAD), ALL_ROUNDS],
        args.rounds,
        warm_up=True,
        notes=lambda results: [f"bar: {results[0].label} / {results[1].label} ≤ 1.11"],
    )
    run_and_report(experiment, args.out)


ENGINE, SERVER = "bare engine", "gRPC"
NUM_STEPS = 32
NUM_NEW = 4000  # the context that streams may grow to
NUM_LONG = (1, 3)  # long prompts that are read while a short one waits


def run_streams(args: argparse.Namespace) -> None:
    bundle = bundle_of(args.bundle, getattr(args, "precision", None))
    manifest = read_manifest(bundle)
    context = max(args.long_prompt, NUM_NEW) + PAST_TOKENS
    if manifest.family != "causal" or manifest.sizes.context < context:
        raise OptionError(f"{bundle}: a causal model with a context of {context} is needed")
    precision = choose_graphs(manifest, "cpu", args.precision).graphs.precision
    options = ["--precision", precision, "--max-num-seqs", str(args.streams)]
    options += ["--context", str(context), "--threads", num_threads(args)]
    options += ["--no-prefix-cache", "--no-speculative"]
    server = ServerConfig(str(bundle), tuple(options)).command("quill_streams")
    (engine,) = engine_entries(args, bundle, [precision])
    ids = random_ids(args.long_prompt + max(NUM_LONG), manifest.sizes.vocab_size)
    experiment = Experiment(
        "streams",
        f"{precision}, {args.streams} streams",
        [Entry(engine.command, ENGINE), Entry(server, SERVER)],
        stream_workloads(ids, args.streams),
        BAR_COLUMNS,
        args.rounds,
        rows=stream_rows,
    )
    run_and_report(experiment, args.out)


def stream_workloads(ids: Sequence[int], num_streams: int) -> list[Workload]:
    prompt, long_ids = list(ids[:PAST_TOKENS]), list(ids[max(NUM_LONG) :])
    base: dict[str, Any] = {"ids": prompt, "num_seqs": num_streams}
    steps = base | {"do": "decode", "num_steps": NUM_STEPS}
    stall = {"do": "stall", "ids": prompt, "long_ids": long_ids, "num_seqs": num_streams // 2}
    return [
        Workload("greedy", [steps], num_streams * NUM_STEPS),
        Workload("sampled", [steps | {"sampling": "sampled"}], entries=(SERVER,)),
        Workload("stall", [stall], entries=(SERVER,)),
        *(
            Workload(
                f"beside {num}",
                [
                    {
                        "do": "wait_beside",
                        "prompts": [list(ids[i : i + len(long_ids)]) for i in range(num)],
                    }
                ],
                entries=(SERVER,),
            )
            for num in NUM_LONG
        ),
        Workload("cancel", [base | {"do": "cancel"}], entries=(SERVER,)),
    ]


def stream_rows(results: Results) -> list[BarRow]:
    """The result of all rounds, and each round's."""
    engine, server = results
    bare, greedy = engine.speeds("greedy"), server.speeds("greedy")
    cancels = [value for turn in server.turns["cancel"] for value in turn["values"]]

    def row(
        label: str,
        bar: str,
        values: Sequence[float],
        result: Callable[[Sequence[float]], float] = min,
        digits: int = 2,
    ) -> BarRow:
        return BarRow(label, bar, number(result(values), digits), numbers(values, digits))

    def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
        return [a / b for a, b in zip(over, under, strict=True)]

    def found(workload: str) -> list[float]:
        return [turn["value"] for turn in server.turns[workload]]

    sampled = ratios(greedy, server.speeds("sampled"))
    beside = {num: found(f"beside {num}") for num in NUM_LONG}
    return [
        row("tokens/s: bare engine", "", bare, max, 0),
        row("tokens/s: over gRPC", "", greedy, max, 0),
        row("gRPC / bare engine", "≥ 0.9", ratios(greedy, bare), median),
        row("greedy / sampled, tokens/s", "≤ 1.05", sampled, median),
        row("p95 gap, long prompt", "≤ 2", found("stall")),
        *(row(f"first token beside {n} long prompts, s", "≤ 1", beside[n]) for n in NUM_LONG),
        row("cancel to admission, p95 in steps", "≤ 2", cancels, lambda v: np.percentile(v, 95)),
    ]
