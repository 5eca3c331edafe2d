"""`quill serve` as a contender, asked by streams over gRPC.

Knows: its options, the wire. Does not know: who else is measured.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc

from quill.export.bundle.manifest import read_manifest
from quill.loadtest.bench.contenders.serving import Load, Serving, Streamed
from quill.loadtest.environment.own_server import own_server
from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc


def options(load: Load, precision: str | None, token_bytes: int) -> list[str]:
    """Memory for what the users hold at once, and a quarter more, so that some of it is kept."""
    num_tokens = load.num_shared + load.num_users * (load.context - load.num_shared)
    megabytes = math.ceil(1.25 * max(num_tokens, 2 * load.context) * token_bytes / 2**20)
    given = ["--max-rows", str(load.num_users), "--context", str(load.context)]
    given += ["--cache", str(megabytes)]
    given += ["--threads", str(load.num_threads)]
    given += [] if load.num_shared else ["--no-prefix-cache"]
    return given + (["--precision", precision] if precision else [])


def _token_bytes(bundle: Path, precision: str | None) -> int:
    """Of the precision, or of the best that a server would take."""
    manifest = read_manifest(bundle)
    graphs = [manifest.graphs_in(precision)] if precision else manifest.graphs
    return min(manifest.cache_bytes_per_token(each.cache_type) for each in graphs)


def request(ids: Sequence[int], load: Load) -> pb.GenerateRequest:
    """Nothing is left to the bundle's own defaults."""
    return pb.GenerateRequest(
        prompt_ids=pb.TokenIds(ids=ids),
        max_new_tokens=load.num_new,
        ignore_eos=True,
        temperature=load.temperature,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
    )


@contextmanager
def quill_server(bundle: Path, precision: str | None, load: Load, log: Path) -> Iterator[Serving]:
    with (
        own_server(
            log, bundle, *options(load, precision, _token_bytes(bundle, precision))
        ) as server,
        standing_server(server.address, load) as standing,
    ):
        yield replace(standing, name="Quill", pid=server.pid)


@contextmanager
def standing_server(address: str, load: Load) -> Iterator[Serving]:
    """A Quill of any version that somebody has started, with whatever options."""
    with grpc.insecure_channel(address) as channel:
        stub = pb_grpc.TextGenerationStub(channel)
        model = stub.GetModel(pb.GetModelRequest())
        yield Serving(
            f"Quill at {address}",
            *(model.precision, None, lambda ids: _stream(stub, request(ids, load))),
        )


def _stream(stub: pb_grpc.TextGenerationStub, wanted: pb.GenerateRequest) -> Streamed:
    asked_s, first_s, num_tokens = time.perf_counter(), 0.0, 0
    for chunk in stub.GenerateStream(wanted):
        if not num_tokens:
            first_s = time.perf_counter() - asked_s
        num_tokens += len(chunk.token_ids)
    return Streamed(num_tokens, first_s)
