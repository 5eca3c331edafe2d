"""Every door says the same: tokens, ends, refusals, and that somebody left."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quill.loadtest.environment.own_server import OwnServer, own_server
from quill.loadtest.protocols.door import CallError, Door
from quill.loadtest.protocols.grpc_door import GrpcDoor
from quill.loadtest.protocols.names import DOORS, DoorName
from quill.loadtest.protocols.open_door import open_door
from quill.loadtest.results.verify import verify
from quill.loadtest.workload.ask import Ask, Facts
from quill.loadtest.workload.call import call
from quill.loadtest.workload.records import RequestRecord
from quill.loadtest.workload.scenarios import make_ask
from quill.protos import generation_pb2 as pb
from quill.server.auth.key_file import add_key
from quill.server.client.access import Access
from tests.server.authority import Authority, write

FACTS = Facts(vocab_size=512, context=128, has_tokenizer=False, has_template=False)
REQUEST = pb.GenerateRequest(
    prompt_ids=pb.TokenIds(ids=[5, 6, 7]), max_new_tokens=20, temperature=0.7, ignore_eos=True
)


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest, server: OwnServer) -> Iterator[Door]:
    protocol: DoorName = request.param
    with closing(open_door(protocol, server.address_for(protocol), Access())) as opened:
        yield opened


def test_all_doors_tell_the_same_of_the_same_request(server: OwnServer) -> None:
    def told(protocol: DoorName, ask: Ask) -> RequestRecord:
        with closing(open_door(protocol, server.address_for(protocol), Access())) as door:
            record = call(door, ask, 0.0).record(ask, 0, "name", 0.0)
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
            ask = make_ask(name, 3, index, FACTS)
            ask.request.seed = index
            if name == "beams":
                ask.request.ClearField("seed")
            records = [replace(told(protocol, ask), seed=0) for protocol in DOORS]
            assert records[0].status == "OK"
            assert records[0] == records[1] == records[2], ask


def test_what_came_through_any_door_is_the_same_alone_over_grpc(
    door: Door, server: OwnServer
) -> None:
    asked = [make_ask("unfriendly", 0, index, FACTS) for index in range(16)]
    records = [
        call(door, ask, 0.0, sleep=lambda _: None).record(ask, index, ask.kind, 0.0)
        for index, ask in enumerate(asked)
    ]
    verdict = verify(server.address, records, lambda number, verdict: None)
    verdict.check()
    assert verdict.num_equal >= 10
    assert {"OK", "CANCELLED", "INVALID_ARGUMENT"} <= {record.status for record in records}


def test_all_doors_keep_answers_to_forms(talker: OwnServer) -> None:
    """The same tokens through each, and alone."""
    with closing(GrpcDoor(talker.address)) as grpc_door:
        facts = Facts.of(grpc_door.get_model())
    asked = [make_ask("structured", 5, index, facts) for index in range(24)]
    for index, ask in enumerate(asked):
        ask.request.seed = index
    told = []
    for protocol in DOORS:
        with closing(open_door(protocol, talker.address_for(protocol), Access())) as door:
            records = [
                call(door, ask, 0.0).record(ask, index, ask.kind, 0.0)
                for index, ask in enumerate(asked)
            ]
        assert [record.message for record in records if not record.ok] == []
        told.append([(record.token_ids, record.finish_reason) for record in records])
        verdict = verify(talker.address, records, lambda number, verdict: None)
        verdict.check()
        assert verdict.num_equal == len(asked)
    assert told[0] == told[1] == told[2]
    assert {reason for _, reason in told[0]} == {"EOS", "LENGTH"}


def test_seed_that_the_server_picked_is_told(door: Door) -> None:
    first = [*door.stream(REQUEST, 30.0)]
    again = pb.GenerateRequest()
    again.CopyFrom(REQUEST)
    again.seed = first[-1].seed
    assert tokens(first) == tokens([*door.stream(again, 30.0)])


def tokens(chunks: list[pb.GenerateChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def test_refusal_is_a_grpc_status_with_words(door: Door) -> None:
    with pytest.raises(CallError, match=r"top_p") as refused:
        next(door.stream(pb.GenerateRequest(prompt_ids=REQUEST.prompt_ids, top_p=1.5), 30.0))
    assert refused.value.status == "INVALID_ARGUMENT"


def test_deadline_is_the_calls_own(door: Door) -> None:
    heard = call(door, Ask(REQUEST, timeout_s=1e-4), 0.0).heard
    assert heard.status in ("DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")


def test_door_can_be_used_by_several_at_once(door: Door) -> None:
    streams = [door.stream(REQUEST, 30.0) for _ in range(3)]
    begun = [next(stream) for stream in streams]
    rest = [tokens([first, *stream]) for first, stream in zip(begun, streams, strict=True)]
    assert [len(each) for each in rest] == [20, 20, 20]


def test_nobody_there_is_unavailable() -> None:
    for protocol in DOORS:
        with closing(open_door(protocol, "127.0.0.1:9", Access())) as door:
            assert call(door, Ask(REQUEST), 0.0).heard.status == "UNAVAILABLE"


@pytest.fixture(scope="module")
def guarded(
    bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[OwnServer, Access]]:
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
    with own_server(directory / "log", bundle, *map(str, options), access=access) as running:
        yield running, access


@pytest.mark.parametrize("protocol", DOORS)
def test_doors_prove_who_they_are(protocol: DoorName, guarded: tuple[OwnServer, Access]) -> None:
    server, access = guarded
    address = server.address_for(protocol)
    with closing(open_door(protocol, address, access)) as door:
        assert call(door, Ask(REQUEST), 0.0).heard.status == "OK"
    with closing(open_door(protocol, address, replace(access, api_key=None))) as door:
        assert call(door, Ask(REQUEST), 0.0).heard.status == "UNAUTHENTICATED"
