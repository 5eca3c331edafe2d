"""`quill bench server`: a crowd of closed-loop users through gRPC, and how much memory it took.

Knows: `quill serve`, the wire, peers' servers. Does not know: engines.

Every user asks for answers of the same length, with prompts of different lengths. Quill streams
its answers; the peers send theirs at once, which is less work.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import grpc
from rich import box
from rich.console import Console
from rich.table import Table

from quill.cache import cache_directory
from quill.export.bundle.manifest import Manifest, read_manifest
from quill.loadtest.bench.contenders.llama_server import llama_server
from quill.loadtest.bench.contest import Running, running
from quill.loadtest.bench.models import PEERS_PYTHON, default_bundle, held_out, prepare_peers
from quill.loadtest.bench.tasks import random_ids
from quill.loadtest.environment.machine import machine_facts, num_cores
from quill.loadtest.environment.own_server import own_server
from quill.loadtest.environment.process_stats import peak_bytes_of
from quill.loadtest.errors import OptionError
from quill.loadtest.workload.closed_loop import Ask, LoopResult, closed_loop
from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc

PROMPT_LENGTHS = (16, 128)
NUM_PROMPTS = 64
WARM_UP_S = 1.0
GENAI = ("int4", "int8")


@dataclass(frozen=True)
class ServerResult:
    """One server under the crowd."""

    name: str
    served: LoopResult
    peak_bytes: int


class QuillResult(NamedTuple):
    """Quill under the crowd, and what its peers need to know of it."""

    measured: ServerResult
    precision: str
    texts: list[str]  # the prompts, if the model has a tokenizer


def run(args: argparse.Namespace) -> None:
    bundle = args.bundle or default_bundle()
    manifest = read_manifest(bundle)
    ids = _ids(manifest.sizes.vocab_size, args.peers)
    prompts = make_prompts(ids, args.context - args.answer)
    with tempfile.TemporaryDirectory() as logs:
        quill = measure_quill(args, bundle, prompts, Path(logs))
        measured = [quill.measured]
        if args.peers:
            measured += measure_peers(args, prompts, quill.texts, Path(logs))
    console = Console(highlight=False)
    console.print(_table(measured))
    expected = expected_bytes(manifest, quill.precision, args)
    console.print(
        f"Quill's peak memory: {measured[0].peak_bytes / 1e6:.0f} MB, "
        f"{measured[0].peak_bytes / expected:.2f} of weights and caches ({expected / 1e6:.0f} MB)"
    )
    if args.out is not None:
        _write(measured, expected, args.out)


def _ids(vocab_size: int, peers: bool) -> list[int]:
    """Peers take text, and random tokens make none that would come back as so many tokens."""
    if not peers:
        return random_ids(NUM_PROMPTS + PROMPT_LENGTHS[1], vocab_size)
    return [token for passage in held_out(cache_directory()) for token in passage]


def make_prompts(ids: Sequence[int], max_length: int) -> list[list[int]]:
    """Of all lengths in between, no two alike."""
    shortest, longest = PROMPT_LENGTHS
    longest = max(shortest, min(longest, max_length))
    lengths = [shortest + (longest - shortest) * i // NUM_PROMPTS for i in range(NUM_PROMPTS)]
    return [list(ids[i : i + length]) for i, length in enumerate(lengths)]


def measure_quill(
    args: argparse.Namespace, bundle: Path, prompts: Sequence[Sequence[int]], logs: Path
) -> QuillResult:
    options = ["--max-rows", str(args.users), "--context", str(args.context)]
    options += ["--threads", str(args.threads or num_cores()), "--no-prefix-cache"]
    if args.precision:
        options += ["--precision", args.precision]
    with (
        own_server(logs / "quill.log", bundle, *options) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub = pb_grpc.TextGenerationStub(channel)
        served = _measure(lambda ids: _stream(stub, ids, args.answer), prompts, args)
        model = stub.GetModel(pb.GetModelRequest())
        texts = [_text(stub, ids) for ids in prompts] if args.peers else []
        measured = ServerResult(f"Quill {model.precision}", served, peak_bytes_of(server.pid))
        return QuillResult(measured, model.precision, texts)


def _stream(stub: pb_grpc.TextGenerationStub, ids: Sequence[int], num_new: int) -> int:
    request = pb.GenerateRequest(
        prompt_ids=pb.TokenIds(ids=ids), max_new_tokens=num_new, temperature=0.0, ignore_eos=True
    )
    return sum(len(chunk.token_ids) for chunk in stub.GenerateStream(request))


def _text(stub: pb_grpc.TextGenerationStub, ids: Sequence[int]) -> str:
    return stub.Detokenize(pb.DetokenizeRequest(token_ids=ids)).text


def _measure(ask: Ask, prompts: Sequence[Sequence[int]], args: argparse.Namespace) -> LoopResult:
    closed_loop(ask, prompts, args.users, WARM_UP_S)
    return closed_loop(ask, prompts, args.users, args.duration)


def measure_peers(
    args: argparse.Namespace,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[str],
    logs: Path,
) -> list[ServerResult]:
    if not PEERS_PYTHON.exists():
        raise OptionError("the peers aren't installed. Run `make peers` first; it takes minutes")
    cache = cache_directory()
    prepare_peers(cache)
    threads = args.threads or num_cores()
    by_ids = dict(zip(map(tuple, prompts), texts, strict=True))
    path = cache / "peers" / "q8_0.gguf"
    with llama_server(PEERS_PYTHON, path, threads, logs / "llama-server.log") as server:
        served = _measure(
            lambda ids: server.complete(by_ids[tuple(ids)], args.answer), prompts, args
        )
        llama = ServerResult("llama-cpp-python's server, Q8_0", served, peak_bytes_of(server.pid))
    return [llama, *(_one_by_one(kind, cache, threads, prompts, args, logs) for kind in GENAI)]


def _one_by_one(
    kind: str,
    cache: Path,
    threads: int,
    prompts: Sequence[Sequence[int]],
    args: argparse.Namespace,
    logs: Path,
) -> ServerResult:
    """A loop that answers one request after another."""
    path = str(cache / "peers" / f"genai-{kind}")
    command = [
        str(PEERS_PYTHON),
        "-m",
        "quill.loadtest.bench.contenders.genai",
        path,
        kind,
        str(threads),
    ]
    with running(command, logs / "genai.log") as genai:
        served = closed_loop(lambda ids: _answer(genai, ids, args.answer), prompts, 1, 0.0)
        served = closed_loop(
            lambda ids: _answer(genai, ids, args.answer), prompts, 1, args.duration
        )
        peak = genai.ask({"do": "memory"})["peak_bytes"]
    return ServerResult(f"a loop over onnxruntime-genai, {kind}", served, peak)


def _answer(genai: Running, ids: Sequence[int], num_new: int) -> int:
    genai.ask({"do": "answer", "ids": list(ids), "num_new": num_new})
    return num_new


def expected_bytes(manifest: Manifest, precision: str, args: argparse.Namespace) -> int:
    """Weights, and slots that are full."""
    graphs = manifest.graphs_in(precision)
    weights = next(file.size for file in manifest.files if file.name == graphs.weights)
    a_token = manifest.cache_bytes_per_token(graphs.cache_type)
    return int(weights + args.users * args.context * a_token)


def _table(measured: Sequence[ServerResult]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD)
    for name in ("", "tokens/s", "requests", "Quill is … times as fast", "peak MB"):
        shown.add_column(name, justify="left" if not name else "right")
    ours = measured[0].served.tokens_a_second
    for each in measured:
        shown.add_row(
            each.name,
            f"{each.served.tokens_a_second:.1f}",
            str(each.served.num_requests),
            f"{ours / each.served.tokens_a_second:.2f}",
            f"{each.peak_bytes / 1e6:.0f}",
        )
    return shown


def _write(measured: Sequence[ServerResult], expected: int, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    servers = {
        each.name: each.served._asdict() | {"peak_bytes": each.peak_bytes} for each in measured
    }
    record = {"facts": machine_facts(), "servers": servers, "weights_and_caches": expected}
    (out / "server.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
