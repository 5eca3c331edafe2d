"""All protocols have the same tokens, finish reasons, errors and cancellation."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quill.loadtest.environment.server import StartedServer, start_server
from quill.loadtest.protocols.connect import connect
from quill.loadtest.protocols.grpc import CallError, GrpcClient, ProtocolClient
from quill.loadtest.protocols.names import PROTOCOLS, ProtocolName
from quill.loadtest.results.verify import verify
from quill.loadtest.workload.call import call
from quill.loadtest.workload.records import RequestRecord
from quill.loadtest.workload.request import LoadRequest, ModelInfo
from quill.loadtest.workload.scenarios import make_request
from quill.protos import generation_pb2 as pb
from quill.server.auth.key_file import add_key
from quill.server.client.access import Access
from tests.server.authority import Authority, write

INFO = ModelInfo(vocab_size=512, context=128, has_tokenizer=False, has_template=False)
REQUEST = pb.GenerateRequest(
    prompt_ids=pb.TokenIds(ids=[5, 6, 7]), max_new_tokens=20, temperature=0.7, ignore_eos=True
)


@pytest.fixture(params=PROTOCOLS)
def client(request: pytest.FixtureRequest, server: StartedServer) -> Iterator[ProtocolClient]:
    protocol: ProtocolName = request.param
    with closing(connect(protocol, server.address_for(protocol), Access())) as opened:
        yield opened


def test_all_protocols_have_the_same_answer_to_the_same_request(server: StartedServer) -> None:
    def told(protocol: ProtocolName, load: LoadRequest) -> RequestRecord:
        with closing(connect(protocol, server.address_for(protocol), Access())) as client:
            record = call(client, load, 0.0).record(load, 0, "name", 0.0)
        assert record.server_first_token_ms
        # Only these are of the moment.
        moment: dict[str, Any] = {
            "late_ms": 0.0,
            "total_ms": 0.0,
            "arrivals_ms": (),
            "cached_tokens": 0,
        }
        moment |= dict.fromkeys(("first_token_ms", "server_first_token_ms", "server_queue_ms"))
        return replace(record, **moment)

    for name in ("short-chat", "long-answer", "beams"):
        for index in range(3):
            load = make_request(name, 3, index, INFO)
            load.request.seed = index
            if name == "beams":
                load.request.ClearField("seed")
            records = [replace(told(protocol, load), seed=0) for protocol in PROTOCOLS]
            assert records[0].status == "OK"
            assert records[0] == records[1] == records[2], load


def test_answers_over_any_protocol_are_the_same_alone_over_grpc(
    client: ProtocolClient, server: StartedServer
) -> None:
    loads = [make_request("unfriendly", 0, index, INFO) for index in range(16)]
    records = [
        call(client, load, 0.0, sleep=lambda _: None).record(load, index, load.kind, 0.0)
        for index, load in enumerate(loads)
    ]
    verdict = verify(server.address, records, lambda number, verdict: None)
    verdict.check()
    assert verdict.num_equal >= 10
    assert {"OK", "CANCELLED", "INVALID_ARGUMENT"} <= {record.status for record in records}


def test_structured_output_is_the_same_over_all_protocols(talker: StartedServer) -> None:
    """The same tokens through each, and alone."""
    with closing(GrpcClient(talker.address)) as grpc_client:
        info = ModelInfo.of(grpc_client.get_model())
    loads = [make_request("structured", 5, index, info) for index in range(24)]
    for index, load in enumerate(loads):
        load.request.seed = index
    told = []
    for protocol in PROTOCOLS:
        with closing(connect(protocol, talker.address_for(protocol), Access())) as client:
            records = [
                call(client, load, 0.0).record(load, index, load.kind, 0.0)
                for index, load in enumerate(loads)
            ]
        assert [record.message for record in records if not record.ok] == []
        told.append([(record.token_ids, record.finish_reason) for record in records])
        verdict = verify(talker.address, records, lambda number, verdict: None)
        verdict.check()
        assert verdict.num_equal == len(loads)
    assert told[0] == told[1] == told[2]
    assert {reason for _, reason in told[0]} == {"EOS", "LENGTH"}


def test_seed_that_the_server_picked_is_told(client: ProtocolClient) -> None:
    first = [*client.stream(REQUEST, 30.0)]
    again = pb.GenerateRequest()
    again.CopyFrom(REQUEST)
    again.seed = first[-1].seed
    assert tokens(first) == tokens([*client.stream(again, 30.0)])


def tokens(chunks: list[pb.GenerateChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def test_refusal_is_a_grpc_status_with_words(client: ProtocolClient) -> None:
    with pytest.raises(CallError, match=r"top_p") as refused:
        next(client.stream(pb.GenerateRequest(prompt_ids=REQUEST.prompt_ids, top_p=1.5), 30.0))
    assert refused.value.status == "INVALID_ARGUMENT"


def test_deadline_is_the_calls_own(client: ProtocolClient) -> None:
    result = call(client, LoadRequest(REQUEST, timeout_s=1e-4), 0.0).result
    if result.status == "OK":  # gRPC's timers are a millisecond late: there was a token to send
        assert result.last is not None
        assert result.last.finish_reason == pb.FINISH_REASON_DEADLINE
    else:
        assert result.status in ("DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")


def test_client_takes_concurrent_requests(client: ProtocolClient) -> None:
    streams = [client.stream(REQUEST, 30.0) for _ in range(3)]
    begun = [next(stream) for stream in streams]
    rest = [tokens([first, *stream]) for first, stream in zip(begun, streams, strict=True)]
    assert [len(each) for each in rest] == [20, 20, 20]


def test_nobody_there_is_unavailable() -> None:
    for protocol in PROTOCOLS:
        with closing(connect(protocol, "127.0.0.1:9", Access())) as client:
            assert call(client, LoadRequest(REQUEST), 0.0).result.status == "UNAVAILABLE"


@pytest.fixture(scope="module")
def guarded(
    bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[StartedServer, Access]]:
    """With TLS, for those who have a key and a certificate."""
    directory = tmp_path_factory.mktemp("guarded")
    ours = Authority("ours")
    files = write(directory, ours.sign("server"))
    ca, keys = directory / "ca", directory / "keys.json"
    ca.write_bytes(ours.cert)
    proof = ours.sign("client")
    access = Access(ca=ours.cert, cert=proof.cert, key=proof.key, api_key=add_key(keys, "alice"))
    options = ["--tls-cert", files.cert, "--tls-key", files.key, "--client-ca", ca]
    options += ["--api-keys", keys, "--threads", "1", "--max-num-seqs", "2"]
    with start_server(directory / "log", bundle, *map(str, options), access=access) as running:
        yield running, access


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_clients_authenticate(
    protocol: ProtocolName, guarded: tuple[StartedServer, Access]
) -> None:
    server, access = guarded
    address = server.address_for(protocol)
    with closing(connect(protocol, address, access)) as client:
        assert call(client, LoadRequest(REQUEST), 0.0).result.status == "OK"
    with closing(connect(protocol, address, replace(access, api_key=None))) as client:
        assert call(client, LoadRequest(REQUEST), 0.0).result.status == "UNAUTHENTICATED"
