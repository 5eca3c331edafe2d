"""One request, measured: what counts, from when, and how it may end."""

import itertools
from collections.abc import Iterator
from concurrent import futures
from contextlib import closing, contextmanager

import grpc
import pytest

from quill.loadtest.environment.server import StartedServer
from quill.loadtest.protocols.grpc import CallError, Chunks, GrpcClient
from quill.loadtest.workload.call import StreamResult, call, from_json, to_json
from quill.loadtest.workload.request import LoadRequest
from quill.protos import generation_pb2 as pb

REQUEST = pb.GenerateRequest(
    prompt_ids=pb.TokenIds(ids=[5, 6, 7]), max_new_tokens=20, temperature=0.7, ignore_eos=True
)
# So much that it never comes in one message, however late the first one is read.
LONG = pb.GenerateRequest(
    prompt_ids=pb.TokenIds(ids=[5, 6, 7]), max_new_tokens=120, temperature=0.7, ignore_eos=True
)


@pytest.fixture
def client(server: StartedServer) -> Iterator[GrpcClient]:
    with closing(GrpcClient(server.address)) as opened:
        yield opened


def test_answer_is_recorded_whole(client: GrpcClient) -> None:
    load = LoadRequest(REQUEST)
    record = call(client, load, 0.0).record(load, 4, "name", 1000.0, 2.5)
    assert (record.status, record.ok, record.finish_reason) == ("OK", True, "LENGTH")
    assert (record.index, record.scenario, record.offered_rate) == (4, "name", 2.5)
    assert (record.num_tokens, record.prompt_tokens) == (20, 3)
    assert len(record.arrivals_ms) == 20
    assert list(record.arrivals_ms) == sorted(record.arrivals_ms)
    assert record.first_token_ms == record.arrivals_ms[0]
    assert record.server_first_token_ms is not None
    assert record.server_first_token_ms > 0
    assert record.server_queue_ms is not None
    assert record.seed is not None
    assert from_json(record.request) == REQUEST


def test_latency_counts_from_the_intended_start(client: GrpcClient) -> None:
    load, ticks = LoadRequest(LONG), itertools.count(100)
    measured = call(client, load, 97.0, clock=lambda: float(next(ticks)))
    record = measured.record(load, 0, "name", 0.0)
    assert record.late_ms == 3000.0
    assert record.first_token_ms == 4000.0
    assert record.total_ms > record.arrivals_ms[-1] > 4000.0


def test_client_that_cancels_keeps_what_it_got(client: GrpcClient) -> None:
    load = LoadRequest(LONG, cancel_after=3, expected=("CANCELLED",))
    record = call(client, load, 0.0).record(load, 0, "name", 0.0)
    assert (record.status, record.ok, record.finish_reason) == ("CANCELLED", True, "")
    assert record.num_tokens >= 3


def test_slow_reader_rests_after_each_chunk(client: GrpcClient) -> None:
    rests: list[float] = []
    result = call(client, LoadRequest(REQUEST, pause_s=0.25), 0.0, sleep=rests.append).result
    assert result.status == "OK"
    assert rests
    assert set(rests) == {0.25}


def test_error_is_its_grpc_status(client: GrpcClient) -> None:
    load = LoadRequest(pb.GenerateRequest())
    record = call(client, load, 0.0).record(load, 0, "name", 0.0)
    assert (record.status, record.ok, record.first_token_ms) == ("INVALID_ARGUMENT", False, None)
    assert record.message


class Resetting:
    """A client whose server resets each stream."""

    def stream(self, request: pb.GenerateRequest, timeout_s: float) -> Chunks:
        yield from ()
        raise CallError("CANCELLED", "")

    def embed(self, request: pb.EmbedRequest, timeout_s: float) -> pb.EmbedResponse:
        raise NotImplementedError

    def close(self) -> None: ...


@pytest.mark.parametrize(("took_s", "status"), [(2.0, "DEADLINE_EXCEEDED"), (1.9, "CANCELLED")])
def test_reset_at_the_deadline_is_the_deadlines(took_s: float, status: str) -> None:
    times_s = iter([0.0, took_s, took_s])
    load = LoadRequest(REQUEST, timeout_s=2.0)
    assert call(Resetting(), load, 0.0, clock=lambda: next(times_s)).result.status == status


@contextmanager
def saying(*chunks: pb.GenerateChunk) -> Iterator[GrpcClient]:
    """A server that says just this, and ends with OK."""
    handler = grpc.unary_stream_rpc_method_handler(
        lambda request, context: iter(chunks),
        request_deserializer=pb.GenerateRequest.FromString,
        response_serializer=pb.GenerateChunk.SerializeToString,
    )
    service = "quill.v1.TextGeneration"
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {"GenerateStream": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with closing(GrpcClient(f"127.0.0.1:{port}")) as opened:
            yield opened
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize(
    "chunks",
    [
        (),
        (pb.GenerateChunk(token_ids=[1]),),
        (pb.GenerateChunk(finish_reason="FINISH_REASON_EOS"),),
    ],
    ids=["nothing", "no end", "no tokens"],
)
def test_empty_success_is_an_error(chunks: tuple[pb.GenerateChunk, ...]) -> None:
    load = LoadRequest(REQUEST)
    with saying(*chunks) as client:
        record = call(client, load, 0.0).record(load, 0, "name", 0.0)
    assert (record.status, record.ok) == ("EMPTY", False)


def test_requests_survive_json() -> None:
    request = pb.GenerateRequest(
        prompt="ä\n€", temperature=0.1 + 0.2, seed=2**64 - 1, logit_bias={3: -1.5}, stop=["x"]
    )
    assert "\n" not in to_json(request)
    assert from_json(to_json(request)) == request


def test_several_sequences_are_kept_apart_however_they_come() -> None:
    ended = pb.FINISH_REASON_LENGTH
    chunks = [
        pb.GenerateChunk(sequence=1, token_ids=[7]),
        pb.GenerateChunk(sequence=0, token_ids=[1]),
        pb.GenerateChunk(sequence=0, token_ids=[2, 3], finish_reason=ended, seed=5),
        pb.GenerateChunk(sequence=1, token_ids=[8], finish_reason=ended, seed=6),
    ]
    result = StreamResult()
    for second, chunk in enumerate(chunks):
        result.take(chunk, float(second))
    assert result.token_ids == [1, 2, 3, 7, 8]
    assert result.arrivals_s == [0.0, 1.0, 2.0, 2.0, 3.0]
    assert result.last is not None
    assert result.last.seed == 5
