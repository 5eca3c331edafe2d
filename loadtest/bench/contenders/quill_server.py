"""`quill serve` as a contender, asked by streams through its doors.

Knows: its options, what is asked. Does not know: who else is measured.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from quill.export.bundle.manifest import read_manifest
from quill.loadtest.bench.contenders.serving import Load, Serving, Streamed
from quill.loadtest.environment.own_server import own_server
from quill.loadtest.errors import ContenderError
from quill.loadtest.protocols.door import CallError, Door
from quill.loadtest.protocols.grpc_door import GrpcDoor
from quill.loadtest.protocols.names import TITLES, DoorName
from quill.loadtest.protocols.open_door import open_door
from quill.protos import generation_pb2 as pb
from quill.server.client.access import Access

ANSWER_S = 600.0


def options(load: Load, precision: str | None, token_bytes: int) -> list[str]:
    """Memory for what the users hold at once, and a quarter more, so that some of it is kept."""
    num_tokens = load.num_shared + load.num_users * (load.context - load.num_shared)
    megabytes = math.ceil(1.25 * max(num_tokens, 2 * load.context) * token_bytes / 2**20)
    given = ["--max-num-seqs", str(load.num_users), "--context", str(load.context)]
    given += ["--kv-cache-mb", str(megabytes)]
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
def quill_server(
    bundle: Path,
    precision: str | None,
    load: Load,
    log: Path,
    protocols: Sequence[DoorName] = ("grpc",),
) -> Iterator[list[Serving]]:
    """One server, as often as there are doors that it is asked through."""
    given = options(load, precision, _token_bytes(bundle, precision))
    with own_server(log, bundle, *given) as server, ExitStack() as stack:
        kind = stack.enter_context(standing_server(server.address, load)).kind
        servings = []
        for protocol in protocols:
            opened = open_door(protocol, server.address_for(protocol), Access())
            door = stack.enter_context(closing(opened))
            name = "Quill" if protocol == "grpc" else f"Quill over {TITLES[protocol]}"
            servings.append(Serving(name, kind, server.pid, _asking(door, load)))
        yield servings


@contextmanager
def standing_server(address: str, load: Load) -> Iterator[Serving]:
    """A Quill of any version that somebody has started, with whatever options."""
    with closing(GrpcDoor(address)) as door:
        precision = door.get_model().precision
        yield Serving(f"Quill at {address}", precision, None, _asking(door, load))


def _asking(door: Door, load: Load) -> Callable[[Sequence[int]], Streamed]:
    def stream(ids: Sequence[int]) -> Streamed:
        asked_s, first_s, num_tokens = time.perf_counter(), 0.0, 0
        try:
            for chunk in door.stream(request(ids, load), ANSWER_S):
                if not num_tokens:
                    first_s = time.perf_counter() - asked_s
                num_tokens += len(chunk.token_ids)
        except CallError as error:
            raise ContenderError(f"Quill ended a stream: {error}") from error
        return Streamed(num_tokens, first_s)

    return stream
