"""Asking again, alone: what counts as equal, and that a difference is found."""

from contextlib import closing
from dataclasses import replace

import pytest

from quill.loadtest.environment.own_server import OwnServer
from quill.loadtest.errors import DifferentAnswerError
from quill.loadtest.protocols.grpc_door import GrpcDoor
from quill.loadtest.results.verify import Verdict, judge, verify
from quill.loadtest.workload.ask import Ask, Facts
from quill.loadtest.workload.call import StreamResult, call
from quill.loadtest.workload.records import RequestRecord
from quill.loadtest.workload.scenarios import make_ask
from tests.loadtest.made import made

FACTS = Facts(vocab_size=512, context=128, has_tokenizer=False, has_template=False)


@pytest.fixture(scope="module")
def records(server: OwnServer) -> list[RequestRecord]:
    """Of the unfriendly crowd, one after the other."""
    with closing(GrpcDoor(server.address)) as door:
        asked = [make_ask("unfriendly", 0, index, FACTS) for index in range(24)]
        return [
            call(door, ask, 0.0, sleep=lambda _: None).record(ask, index, ask.kind, 0.0)
            for index, ask in enumerate(asked)
        ]


def verdict_on(server: OwnServer, *records: RequestRecord) -> Verdict:
    return verify(server.address, records, lambda number, verdict: None)


def test_equal_answers_are_equal(server: OwnServer, records: list[RequestRecord]) -> None:
    verdict = verdict_on(server, *records)
    verdict.check()
    assert verdict.num_equal + sum(verdict.not_compared.values()) == len(records)
    assert verdict.num_equal > len(records) // 2
    statuses = {record.status for record in records}
    assert {"OK", "CANCELLED", "INVALID_ARGUMENT"} <= statuses


def test_vectors_must_be_the_same_bits(server: OwnServer) -> None:
    with closing(GrpcDoor(server.address)) as door:
        asked = [make_ask("embed", 0, index, FACTS) for index in range(6)]
        records = [call(door, ask, 0.0).record(ask, i, "embed", 0.0) for i, ask in enumerate(asked)]
    assert {record.status for record in records} == {"OK"}
    assert all(record.prompt_tokens and not record.token_ids for record in records)
    assert len({record.vectors for record in records}) == 6
    verdict_on(server, *records).check()
    other = replace(records[0], vectors=records[1].vectors)
    refused = replace(records[2], status="DEADLINE_EXCEEDED")
    verdict = verdict_on(server, other, refused)
    assert verdict.differences == ["request 0: its texts have other vectors alone"]
    assert list(verdict.not_compared) == ["no vectors came (DEADLINE_EXCEEDED)"]


def first(records: list[RequestRecord], status: str) -> RequestRecord:
    return next(r for r in records if r.status == status and (r.num_tokens > 2 or not r.token_ids))


def test_changed_token_is_found(server: OwnServer, records: list[RequestRecord]) -> None:
    for status in ("OK", "CANCELLED"):
        record = first(records, status)
        tokens = (*record.token_ids[:-1], (record.token_ids[-1] + 1) % 512)
        verdict = verdict_on(server, replace(record, token_ids=tokens))
        assert f"different from token {len(tokens) - 1} on" in verdict.differences[0]
        with pytest.raises(DifferentAnswerError, match="1 of 1 answers differ: request"):
            verdict.check()


def test_other_finish_reason_and_missing_token_are_found(
    server: OwnServer, records: list[RequestRecord]
) -> None:
    record = first(records, "OK")
    verdict = verdict_on(
        server,
        replace(record, finish_reason="EOS"),
        replace(record, token_ids=record.token_ids[:-1]),
        replace(first(records, "INVALID_ARGUMENT"), request=record.request),
    )
    assert len(verdict.differences) == 3
    assert "finish reason EOS in the crowd, LENGTH alone" in verdict.differences[0]
    assert "INVALID_ARGUMENT in the crowd, OK alone" in verdict.differences[2]


def test_empty_success_is_a_difference() -> None:
    verdict = Verdict()
    judge(made(status="EMPTY", token_ids=()), lambda ask: StreamResult(), verdict)
    assert "without an answer" in verdict.differences[0]


def test_seed_that_the_server_named_is_used() -> None:
    asked: list[Ask] = []

    def replay(ask: Ask) -> StreamResult:
        asked.append(ask)
        return StreamResult(token_ids=[1, 2, 3, 4, 5])

    verdict = Verdict()
    judge(made(seed=99, status="CANCELLED", finish_reason=""), replay, verdict)
    assert asked[0].request.seed == 99
    assert asked[0].cancel_after == 5
    assert verdict.num_equal == 1


def test_what_cannot_be_compared_is_said() -> None:
    verdict = Verdict()
    for record in (
        made(status="RESOURCE_EXHAUSTED", finish_reason="", token_ids=(), arrivals_ms=()),
        made(status="UNAVAILABLE", finish_reason="", seed=None),
    ):
        judge(record, lambda ask: StreamResult(), verdict)
    assert str(verdict) == (
        "verified: 0 of 0 answers are equal alone; "
        "1 not compared: UNAVAILABLE before the server named its seed; "
        "1 not compared: no tokens came (RESOURCE_EXHAUSTED)"
    )
    with pytest.raises(DifferentAnswerError, match="nothing could be compared"):
        verdict.check()


def test_answer_that_fails_alone_is_a_difference() -> None:
    verdict = Verdict()
    judge(made(), lambda ask: StreamResult(status="INTERNAL", message="oh"), verdict)
    assert "5 tokens in the crowd, INTERNAL alone: oh" in verdict.differences[0]
