"""What a server tells of itself: metrics and logs, and never a prompt."""

import asyncio
import json
import logging
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.client.errors import CallError
from quill.server.client.sync_client import Client
from quill.server.telemetry.call_record import JsonFormatter, TextFormatter, is_news
from quill.server.telemetry.metrics import stats
from tests.server.running import Running, make_manifest, make_served, running_server
from tests.server.scripted_session import TIMEOUT_S


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with running_server(metrics_port=0) as server:
        yield server


def scrape(running: Running) -> dict[str, float]:
    url = f"http://127.0.0.1:{running.server.metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
        lines = reply.read().decode().splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }


def test_metrics_count_requests_tokens_and_steps(running: Running) -> None:
    before = scrape(running)
    with Client(running.address) as client:
        for _ in range(2):
            client.generate("x" * 40, max_new_tokens=3, timeout_s=TIMEOUT_S)
    running.next_record("OK")
    running.next_record("OK")
    after = scrape(running)

    def growth(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert growth('quill_requests_total{method="Generate",outcome="OK"}') == 2
    assert growth('quill_tokens_total{kind="prompt"}') == 80
    assert growth('quill_tokens_total{kind="cached"}') == 32
    assert growth('quill_tokens_total{kind="generated"}') == 6
    assert growth("quill_generation_tokens_total") == 6
    assert growth("quill_prefix_cache_hits_total") == 1
    assert growth("quill_prefix_cache_misses_total") == 1
    assert growth("quill_time_to_first_token_seconds_count") == 2
    assert growth("quill_inter_token_latency_seconds_count") == 4
    assert growth("quill_queue_time_seconds_count") == 2
    assert growth('quill_step_time_seconds_count{kind="decode"}') == 4
    assert after["quill_max_num_seqs"] == 4
    assert after["quill_sequences_running"] == after["quill_requests_waiting"] == 0


def test_translations_are_no_misses_of_a_cache_that_they_dont_have() -> None:
    served = make_served(manifest=make_manifest(family="seq2seq"))
    with running_server(served=served, metrics_port=0) as running:
        with Client(running.address) as client:
            client.generate("abc", max_new_tokens=3, timeout_s=TIMEOUT_S)
        running.next_record("OK")
        after = scrape(running)
    assert after['quill_tokens_total{kind="generated"}'] == 3
    assert after["quill_prefix_cache_hits_total"] == after["quill_prefix_cache_misses_total"] == 0


def test_forms_are_counted_and_timed_and_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    served = make_served()
    served = replace(served, limits=replace(served.limits, speculative=True))
    form = pb.Constraint(choice=pb.Choice(choices=["qqsecretqq", "qqsecretly"]))
    with running_server(served=served, metrics_port=0) as running:
        with caplog.at_level(logging.INFO), Client(running.address) as client:
            for _ in range(3):
                client.generate("abc", constraint=form, timeout_s=TIMEOUT_S)
            client.generate("abc", max_new_tokens=3, timeout_s=TIMEOUT_S)
            with pytest.raises(CallError):
                client.generate("abc", constraint=pb.Constraint(regex="qqsecretqq("))
            for _ in range(4):
                running.next_record("OK")
            running.next_record("INVALID_ARGUMENT")
        after = scrape(running)
    assert after["quill_grammar_cache_misses_total"] == 2
    assert after["quill_grammar_cache_hits_total"] == 2
    assert after["quill_grammar_compile_time_seconds_count"] == 2
    assert 0 < after["quill_mask_time_seconds_sum"] < TIMEOUT_S
    # Of "qqsecretqq" all but the first token and the choice between q and l was forced.
    assert after["quill_jump_forward_tokens_total"] == 3 * 8
    assert after["quill_mask_time_seconds_count"] < after["quill_generation_tokens_total"]
    lines = [json.loads(JsonFormatter().format(each)) for each in caplog.records]
    assert [("compile_ms" in each) for each in lines if "has_constraint" in each] == [
        True,
        False,
        False,
        True,
    ]
    assert not any("secret" in each.getMessage() + str(vars(each)) for each in caplog.records)


def test_row_whose_client_left_between_two_steps_is_not_counted_any_more(running: Running) -> None:
    running.session.hold()
    running.session.let_go(1)
    with Client(running.address) as client:
        chunks = client.stream("abc", max_new_tokens=100, timeout_s=TIMEOUT_S)
        next(chunks)
        chunks.close()
    running.next_record("CANCELLED")
    running.session.let_go()
    registry = running.server.metrics.registry
    running.wait_for(lambda: registry.get_sample_value("quill_sequences_running") == 0)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": "qqsecretqq", "temperature": -1.0}, "temperature"),
        ({"prompt": "qqsecretqq" * 100}, "prompt"),
        ({"messages": pb.Conversation(messages=[pb.Message(role="qqsecretqq")])}, "messages"),
        ({"prompt": "qqsecretqq", "stop": [""]}, "stop"),
    ],
)
def test_refused_request_is_one_line_that_names_the_field_and_not_what_it_holds(
    running: Running, fields: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), grpc.insecure_channel(running.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            pb_grpc.TextGenerationStub(channel).Generate(pb.GenerateRequest(**fields))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        running.next_record("INVALID_ARGUMENT")
    (record,) = [each for each in caplog.records if each.message == "request"]
    said = json.loads(JsonFormatter().format(record))
    assert said["outcome"] == "INVALID_ARGUMENT"
    assert said["bad_field"] == named
    assert f" bad_field={named} " in TextFormatter().format(record)
    assert "secret" not in str(vars(record))


def test_finished_request_is_one_line_without_its_prompt(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), Client(running.address) as client:
        client.generate("qqsecretqq", max_new_tokens=3, timeout_s=TIMEOUT_S)
        running.next_record("OK")
    (record,) = [each for each in caplog.records if each.message == "request"]
    fields = json.loads(JsonFormatter().format(record))
    assert (fields["method"], fields["outcome"]) == ("Generate", "OK")
    assert (fields["num_prompt"], fields["num_generated"]) == (10, 3)
    assert fields["finish_reasons"] == "length"
    text = TextFormatter().format(record)
    assert f"request_id={fields['request_id']}" in text
    assert "\n" not in text
    assert not any("secret" in each.getMessage() + str(vars(each)) for each in caplog.records)


def test_values_are_told_by_label_and_histograms_with_their_buckets() -> None:
    registry = CollectorRegistry()
    Gauge("depth", "", registry=registry).set(3)
    counter = Counter("calls", "", ["method", "outcome"], registry=registry)
    counter.labels("a", "OK").inc(2)
    counter.labels("b", "OK").inc()
    times = Histogram("time_seconds", "", ["kind"], registry=registry, buckets=(0.5, 1))
    for value in (0.1, 0.7, 4.0):
        times.labels("x").observe(value)
    read = json.loads(json.dumps(stats(registry), allow_nan=False))
    assert read["time_s"] > 0
    assert read["metrics"]["depth"] == [{"labels": {}, "value": 3}]
    assert read["metrics"]["calls"] == [
        {"labels": {"method": "a", "outcome": "OK"}, "value": 2},
        {"labels": {"method": "b", "outcome": "OK"}, "value": 1},
    ]
    (one,) = read["metrics"]["time_seconds"]
    assert (one["labels"], one["count"], one["buckets"]) == ({"kind": "x"}, 3, [[0.5, 1], [1, 2]])
    assert abs(one["sum"] - 4.8) < 1e-9


def record_of(error: BaseException) -> logging.LogRecord:
    try:
        raise error
    except BaseException:
        return logging.makeLogRecord({"msg": "it failed", "exc_info": sys.exc_info()})


@pytest.mark.parametrize(("error", "told"), [(asyncio.CancelledError(), False), (OSError(), True)])
def test_only_cancelled_calls_are_left_out(error: BaseException, told: bool) -> None:
    assert is_news(record_of(error)) == told


def test_a_line_without_an_error_is_told() -> None:
    assert is_news(logging.makeLogRecord({"msg": "ready"}))
