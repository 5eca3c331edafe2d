"""`quill bench server`: a crowd of closed-loop users through servers, and how much memory it took.

Knows: prompts, rounds, who was best. Does not know: servers' options and wires, engines.

Every user asks for answers of the same length, with prompts of different lengths, and reads each
as it comes. Servers take turns: all of them stand, and only one is asked at a time.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from quill.cache import cache_directory
from quill.export.bundle.manifest import Manifest, read_manifest
from quill.loadtest.bench.contenders.llama_server import llama_server
from quill.loadtest.bench.contenders.quill_server import quill_server, standing_server
from quill.loadtest.bench.contenders.serving import Load, Serving
from quill.loadtest.bench.contest import PAUSE_S
from quill.loadtest.bench.models import LLAMA_SERVER, default_bundle, prepare_peers
from quill.loadtest.bench.tasks import random_ids
from quill.loadtest.environment.machine import machine_facts, num_cores
from quill.loadtest.environment.process_stats import peak_bytes_of
from quill.loadtest.errors import ContenderError, OptionError
from quill.loadtest.protocols.names import DOORS, TITLES
from quill.loadtest.workload.closed_loop import LoopResult, closed_loop

PROMPT_LENGTHS = (16, 128)
NUM_LENGTHS = 64  # between the two
STRIDE = 37  # from one prompt's length to the next one's, so that neighbours differ
NUM_PROMPTS = 1024  # of a round: none comes twice unless it is long
WARM_UP_S = 1.0

Prompts = list[list[int]]


@dataclass(frozen=True)
class Measured:
    """One server under the crowd for a while."""

    served: LoopResult
    first_token_s: float  # the median


@dataclass(frozen=True)
class ServerResult:
    """A server's best round, and the most memory that it had in all of them."""

    name: str
    best: Measured
    peak_bytes: int | None  # None: it isn't ours


def run(args: argparse.Namespace) -> None:
    bundle, load = args.bundle or default_bundle(), read_load(args)
    manifest = read_manifest(bundle)
    rounds = make_rounds(manifest.sizes.vocab_size, load, args.rounds + 1)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        logs = Path(directory)
        gguf = prepare_llama() if args.peers else None
        doors = DOORS if args.protocols else ("grpc",)
        quill = quill_server(bundle, args.precision, load, logs / "quill.log", doors)
        servers = stack.enter_context(quill)
        if gguf is not None:
            peer = llama_server(LLAMA_SERVER, gguf, load, logs / "llama-server.log")
            servers.append(stack.enter_context(peer))
        for address in args.beside:
            servers.append(stack.enter_context(standing_server(address, load)))
        measured = take_turns(servers, load, rounds, args.duration)
    expected, peak_bytes = expected_bytes(manifest, servers[0].kind, load), measured[0].peak_bytes
    assert peak_bytes is not None, "we started it"
    console = Console(highlight=False)
    console.print(_table(measured))
    if args.protocols:
        console.print(_shares(measured[: len(DOORS)]))
    console.print(
        f"Quill's peak memory: {peak_bytes / 1e6:.0f} MB, "
        f"{peak_bytes / expected:.2f} of weights and caches ({expected / 1e6:.0f} MB)"
    )
    if args.out is not None:
        _write(measured, load, expected, args.out)


def read_load(args: argparse.Namespace) -> Load:
    return Load(
        num_users=args.users,
        num_shared=args.shared_prefix,
        num_new=args.answer,
        context=args.shared_prefix + args.context,
        temperature=args.temperature,
        num_threads=args.threads or num_cores(),
    )


def prepare_llama() -> Path:
    """The weights for llama-server."""
    if not LLAMA_SERVER.exists():
        raise OptionError(
            f"there is no {LLAMA_SERVER}. Run `make peers` first; it takes about 20 minutes"
        )
    cache = cache_directory()
    prepare_peers(cache)
    return cache / "peers" / "q8_0.gguf"


def make_rounds(vocab_size: int, load: Load, num_rounds: int) -> list[Prompts]:
    """Everybody's prompts in each round: the same beginning, and then never the same."""
    ids = random_ids(load.num_shared + num_rounds * NUM_PROMPTS + PROMPT_LENGTHS[1], vocab_size)
    shared, ids = ids[: load.num_shared], ids[load.num_shared :]
    max_length = load.context - load.num_shared - load.num_new
    return [
        [shared + tail for tail in make_tails(ids[number * NUM_PROMPTS :], max_length)]
        for number in range(num_rounds)
    ]


def make_tails(ids: Sequence[int], max_length: int) -> Prompts:
    """Of all lengths in between, no two alike."""
    shortest, longest = PROMPT_LENGTHS
    more = max(shortest, min(longest, max_length)) - shortest
    lengths = [
        shortest + more * (i * STRIDE % NUM_LENGTHS) // NUM_LENGTHS for i in range(NUM_PROMPTS)
    ]
    return [list(ids[i : i + length]) for i, length in enumerate(lengths)]


def take_turns(
    servers: Sequence[Serving], load: Load, rounds: Sequence[Prompts], duration_s: float
) -> list[ServerResult]:
    """The first round warms them up: everybody asks once, and what is shared gets known."""
    measured: list[list[Measured]] = [[] for _ in servers]
    for number, prompts in enumerate(rounds):
        for server, results in zip(servers, measured, strict=True):
            time.sleep(PAUSE_S)
            now = measure(server, load, prompts, duration_s if number else WARM_UP_S)
            if number:
                results.append(now)
    return [
        ServerResult(
            f"{server.name} {server.kind}",
            _best(results),
            None if server.pid is None else peak_bytes_of(server.pid),
        )
        for server, results in zip(servers, measured, strict=True)
    ]


def measure(server: Serving, load: Load, prompts: Prompts, duration_s: float) -> Measured:
    firsts_s: list[float] = []

    def ask(ids: Sequence[int]) -> int:
        num_tokens, first_s = server.stream(ids)
        if num_tokens < load.num_new:
            given = f"{num_tokens} tokens instead of {load.num_new}"
            raise ContenderError(f"{server.name} answered {len(ids)} tokens with {given}")
        firsts_s.append(first_s)
        return num_tokens

    served = closed_loop(ask, prompts, load.num_users, duration_s)
    return Measured(served, statistics.median(firsts_s))


def _best(results: Sequence[Measured]) -> Measured:
    return max(results, key=lambda each: each.served.tokens_a_second)


def expected_bytes(manifest: Manifest, precision: str, load: Load) -> int:
    """Weights, and the keys and values of all users if they share nothing."""
    graphs = manifest.graphs_in(precision)
    weights = next(file.size for file in manifest.files if file.name == graphs.weights)
    a_token = manifest.cache_bytes_per_token(graphs.cache_type)
    return int(weights + load.num_users * load.context * a_token)


def _table(measured: Sequence[ServerResult]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD)
    names = ("", "tokens/s", "requests", "first token, s", "Quill is … times as fast", "peak MB")
    for name in names:
        shown.add_column(name, justify="right" if name else "left", no_wrap=not name)
    ours = measured[0].best.served.tokens_a_second
    for each in measured:
        served = each.best.served
        shown.add_row(
            each.name,
            f"{served.tokens_a_second:.1f}",
            str(served.num_requests),
            f"{each.best.first_token_s:.2f}",
            f"{ours / served.tokens_a_second:.2f}",
            "–" if each.peak_bytes is None else f"{each.peak_bytes / 1e6:.0f}",
        )
    return shown


def _shares(doors: Sequence[ServerResult]) -> str:
    """The first is gRPC."""
    first, *others = (each.best.served.tokens_a_second for each in doors)
    names = (TITLES[name] for name in DOORS[1:])
    pairs = zip(names, others, strict=True)
    return "\n".join(f"{name} / gRPC, tokens/s: {rate / first:.3f}" for name, rate in pairs)


def _write(measured: Sequence[ServerResult], load: Load, expected: int, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    servers = {
        each.name: each.best.served._asdict()
        | {"first_token_s": each.best.first_token_s, "peak_bytes": each.peak_bytes}
        for each in measured
    }
    record = {
        "facts": machine_facts(),
        "load": vars(load),
        "servers": servers,
        "weights_and_caches": expected,
    }
    (out / "server.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
