"""What a server tells of itself: metrics and logs, and never a prompt."""

import asyncio
import contextlib
import json
import logging
import re
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.protos import kserve_pb2 as kserve
from quill.server.auth.key_file import add_key
from quill.server.client.access import Access
from quill.server.client.errors import CallError
from quill.server.client.sync_client import Client
from quill.server.errors import REJECTION_REASONS
from quill.server.http.chat import Chat
from quill.server.http.completions import Completions
from quill.server.http.texts import EmbeddingsRoute
from quill.server.telemetry.call_record import OPERATIONS
from quill.server.telemetry.logs import JsonFormatter, TextFormatter, is_news
from quill.server.telemetry.metric_table import page_table
from quill.server.telemetry.metrics import Metrics, stats
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


@pytest.mark.parametrize(("name", "told"), [("grpc._cython.cygrpc", False), ("quill.x", True)])
def test_headers_that_grpc_cannot_decode_are_left_out(name: str, told: bool) -> None:
    """gRPC logs their bytes, which may be a key's, and a traceback of each."""
    record = record_of(UnicodeDecodeError("utf-8", b"Bearer \xff", 7, 8, "invalid start byte"))
    record.name = name
    assert is_news(record) == told


def test_a_line_without_an_error_is_told() -> None:
    assert is_news(logging.makeLogRecord({"msg": "ready"}))


def test_process_build_and_model_are_described(running: Running) -> None:
    after = scrape(running)
    assert after["process_start_time_seconds"] > 1e9
    assert after["process_resident_memory_bytes"] > 1e6
    assert after["quill_engine_process_start_time_seconds"] == after["process_start_time_seconds"]
    (build,) = [name for name in after if name.startswith("quill_build_info")]
    assert f'version="{metadata.version("quill")}"' in build
    labels = 'device="cpu",family="causal",model="reciter",precision="fp32"'
    assert after[f'quill_model_info{{{labels},runtime="onnxruntime 1.31.1"}}'] == 1
    assert after['quill_health_problem{problem="hanging"}'] == 0


def test_what_alerts_count_begins_at_zero() -> None:
    """`rate` sees nothing of a counter that appears with its first value."""
    read = stats(Metrics().registry)["metrics"]
    calls = {tuple(each["labels"].values()): each["value"] for each in read["quill_requests"]}
    assert calls["GenerateStream", "INTERNAL"] == calls["Generate", "DEADLINE_EXCEEDED"] == 0
    reasons = {each["labels"]["reason"]: each["value"] for each in read["quill_rejections"]}
    assert reasons == dict.fromkeys(REJECTION_REASONS, 0)


def test_operations_are_methods_that_exist() -> None:
    services = (
        *pb.DESCRIPTOR.services_by_name.values(),
        *kserve.DESCRIPTOR.services_by_name.values(),
    )
    methods = {method.name for service in services for method in service.methods}
    assert set(OPERATIONS) <= methods | {Chat.path, Completions.path, EmbeddingsRoute.path}


def test_page_has_the_table() -> None:
    page = Path(__file__).parents[3] / "server/docs/monitoring.md"
    assert page_table() in page.read_text()


def test_waiting_requests_are_seen_while_a_step_runs() -> None:
    with running_server(max_num_seqs=1, metrics_port=0) as running:
        running.session.hold()
        with grpc.insecure_channel(running.address) as channel:
            stub = pb_grpc.TextGenerationStub(channel)
            calls = [stub.Generate.future(pb.GenerateRequest(prompt="abc")) for _ in range(3)]
            running.wait_for_requests(3)
            assert scrape(running)["quill_requests_waiting"] >= 2
            for call in calls:
                call.cancel()
        running.session.let_go()
        running.wait_for_waiting(0)
        assert scrape(running)["quill_requests_waiting"] == 0


def test_rejected_call_has_its_reason_in_the_metrics_and_in_its_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.json"
    good = add_key(path, "good")
    expected: dict[str, tuple[str, dict[str, Any]]] = {
        "key_requests_per_minute": (add_key(path, "calls", requests_per_minute=1), {}),
        "key_tokens_per_minute": (add_key(path, "tokens", tokens_per_minute=6), {}),
        "invalid_argument": (good, {"temperature": -1.0}),
        "unauthenticated": ("quill-unknown", {}),
    }
    with running_server(
        metrics_port=0, api_keys=path, allow_unauthenticated=("metrics",)
    ) as running:
        with caplog.at_level(logging.INFO), grpc.insecure_channel(running.address) as channel:
            stub = pb_grpc.TextGenerationStub(channel)
            for key, fields in expected.values():
                for _ in range(2):
                    with contextlib.suppress(grpc.RpcError):
                        request = pb.GenerateRequest(prompt="abc", max_new_tokens=9, **fields)
                        stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),))
        read = scrape(running)
    found = {reason: read[f'quill_rejections_total{{reason="{reason}"}}'] for reason in expected}
    assert found == {**dict.fromkeys(expected, 2), "key_requests_per_minute": 1,
                     "key_tokens_per_minute": 1}  # fmt: skip
    lines = [TextFormatter().format(each) for each in caplog.records if each.message == "request"]
    assert {
        re.findall(r"rejection=(\w+)", line)[0] for line in lines if "outcome=OK" not in line
    } == set(expected)


def test_keys_have_counters_of_their_own_up_to_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    secrets = [add_key(path, name) for name in ("alice", "bob", "carol")]
    with running_server(metrics_port=0, api_keys=path, max_key_labels=1,
                        allow_unauthenticated=("metrics",)) as running:  # fmt: skip
        for secret in secrets:
            with Client(running.address, access=Access(api_key=secret)) as client:
                client.generate("abc", max_new_tokens=2, timeout_s=TIMEOUT_S)
            running.next_record("OK")
        read = scrape(running)
    assert read['quill_key_requests_total{key="alice",outcome="OK"}'] == 1
    assert read['quill_key_requests_total{key="other",outcome="OK"}'] == 2
    assert read['quill_key_tokens_total{key="alice",kind="generated"}'] == 2
    assert read['quill_key_tokens_total{key="other",kind="prompt"}'] == 6
    assert not any('key="bob"' in name for name in read)


def test_times_of_log_lines_have_milliseconds() -> None:
    record = logging.makeLogRecord({"msg": "ready", "created": 1.0625, "msecs": 62.0})
    assert json.loads(JsonFormatter().format(record))["time"][19:23] == ".062"
    assert re.match(r"\d\d:\d\d:\d\d\.062 ", TextFormatter().format(record))
