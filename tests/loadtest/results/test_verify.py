"""Replay alone: what counts as equal, and that a difference is found."""

from contextlib import closing
from dataclasses import replace

import pytest

from quill.loadtest.environment.server import StartedServer
from quill.loadtest.errors import DifferentAnswerError
from quill.loadtest.protocols.grpc import GrpcClient
from quill.loadtest.results.verify import Verdict, judge, verify
from quill.loadtest.workload.call import StreamResult, call
from quill.loadtest.workload.records import RequestRecord
from quill.loadtest.workload.request import LoadRequest, ModelInfo
from quill.loadtest.workload.scenarios import make_request
from tests.loadtest.made import made

INFO = ModelInfo(vocab_size=512, context=128, has_tokenizer=False, has_template=False)


@pytest.fixture(scope="module")
def records(server: StartedServer) -> list[RequestRecord]:
    """Of the scenario unfriendly, one after the other."""
    with closing(GrpcClient(server.address)) as client:
        loads = [make_request("unfriendly", 0, index, INFO) for index in range(24)]
        return [
            call(client, load, 0.0, sleep=lambda _: None).record(load, index, load.kind, 0.0)
            for index, load in enumerate(loads)
        ]


def verdict_on(server: StartedServer, *records: RequestRecord) -> Verdict:
    return verify(server.address, records, lambda number, verdict: None)


def test_equal_answers_are_equal(server: StartedServer, records: list[RequestRecord]) -> None:
    verdict = verdict_on(server, *records)
    verdict.check()
    assert verdict.num_equal + sum(verdict.not_compared.values()) == len(records)
    assert verdict.num_equal > len(records) // 2
    statuses = {record.status for record in records}
    assert {"OK", "CANCELLED", "INVALID_ARGUMENT"} <= statuses


def test_embeddings_must_be_the_same_bits(server: StartedServer) -> None:
    with closing(GrpcClient(server.address)) as client:
        loads = [make_request("embed", 0, index, INFO) for index in range(6)]
        records = [
            call(client, load, 0.0).record(load, i, "embed", 0.0) for i, load in enumerate(loads)
        ]
    assert {record.status for record in records} == {"OK"}
    assert all(record.prompt_tokens and not record.token_ids for record in records)
    assert len({record.embeddings for record in records}) == 6
    verdict_on(server, *records).check()
    other = replace(records[0], embeddings=records[1].embeddings)
    refused = replace(records[2], status="DEADLINE_EXCEEDED")
    verdict = verdict_on(server, other, refused)
    assert verdict.differences == ["request 0: its texts have other embeddings alone"]
    assert list(verdict.not_compared) == ["no embeddings came (DEADLINE_EXCEEDED)"]


def first(records: list[RequestRecord], status: str) -> RequestRecord:
    return next(r for r in records if r.status == status and (r.num_tokens > 2 or not r.token_ids))


def test_changed_token_is_found(server: StartedServer, records: list[RequestRecord]) -> None:
    for status in ("OK", "CANCELLED"):
        record = first(records, status)
        tokens = (*record.token_ids[:-1], (record.token_ids[-1] + 1) % 512)
        verdict = verdict_on(server, replace(record, token_ids=tokens))
        assert f"different from token {len(tokens) - 1} on" in verdict.differences[0]
        with pytest.raises(DifferentAnswerError, match="1 of 1 answers differ: request"):
            verdict.check()


def test_other_finish_reason_and_missing_token_are_found(
    server: StartedServer, records: list[RequestRecord]
) -> None:
    record = first(records, "OK")
    verdict = verdict_on(
        server,
        replace(record, finish_reason="EOS"),
        replace(record, token_ids=record.token_ids[:-1]),
        replace(first(records, "INVALID_ARGUMENT"), request=record.request),
    )
    assert len(verdict.differences) == 3
    assert "finish reason EOS in the load, LENGTH alone" in verdict.differences[0]
    assert "INVALID_ARGUMENT in the load, OK alone" in verdict.differences[2]


def test_empty_success_is_a_difference() -> None:
    verdict = Verdict()
    judge(made(status="EMPTY", token_ids=()), lambda load: StreamResult(), verdict)
    assert "without an answer" in verdict.differences[0]


def test_seed_that_the_server_reported_is_used() -> None:
    loads: list[LoadRequest] = []

    def replay(load: LoadRequest) -> StreamResult:
        loads.append(load)
        return StreamResult(token_ids=[1, 2, 3, 4, 5])

    verdict = Verdict()
    judge(made(seed=99, status="CANCELLED", finish_reason=""), replay, verdict)
    assert loads[0].request.seed == 99
    assert loads[0].cancel_after == 5
    assert verdict.num_equal == 1


def test_what_cannot_be_compared_is_said() -> None:
    verdict = Verdict()
    for record in (
        made(status="RESOURCE_EXHAUSTED", finish_reason="", token_ids=(), arrivals_ms=()),
        made(status="UNAVAILABLE", finish_reason="", seed=None),
    ):
        judge(record, lambda load: StreamResult(), verdict)
    assert str(verdict) == (
        "verified: 0 of 0 answers are equal alone; "
        "1 not compared: UNAVAILABLE before the server reported its seed; "
        "1 not compared: no tokens came (RESOURCE_EXHAUSTED)"
    )
    with pytest.raises(DifferentAnswerError, match="nothing could be compared"):
        verdict.check()


def test_answer_that_fails_alone_is_a_difference() -> None:
    verdict = Verdict()
    judge(made(), lambda load: StreamResult(status="INTERNAL", message="oh"), verdict)
    assert "5 tokens in the load, INTERNAL alone: oh" in verdict.differences[0]
