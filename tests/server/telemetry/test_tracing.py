"""Spans as a collector receives them, over the real protocol."""

import asyncio
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from quill.client import AsyncClient, Client
from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.auth.key_file import add_key
from tests.server.running import Running, running_server
from tests.server.scripted_session import TIMEOUT_S

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
PROMPT = "a prompt that nobody else may read"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: queue.Queue[Any] = queue.Queue()

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.put((resource.resource, span))
        return trace_service_pb2.ExportTraceServiceResponse()

    def take(self) -> dict[str, Any]:
        found = [self.spans.get(timeout=TIMEOUT_S)[1] for _ in range(self.spans.qsize())]
        return {span.name: span for span in found}


@contextmanager
def collecting() -> Iterator[Collector]:
    """Whatever is started meanwhile sends its spans there."""
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        yield collector
    server.stop(None).wait()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def ask(running: Running, **fields: Any) -> None:
    request = pb.GenerateRequest(prompt=PROMPT, max_new_tokens=3, **fields)
    metadata = (("traceparent", TRACEPARENT), ("tracestate", "vendor=1"))
    with grpc.insecure_channel(running.address) as channel:
        stub: Any = pb_grpc.TextGenerationStub(channel)
        stub.Generate(request, metadata=metadata, timeout=TIMEOUT_S)


def test_our_clients_pass_their_trace_on(collector: Collector) -> None:
    context = SpanContext(int(TRACE_ID, 16), int(PARENT_ID, 16), True, TraceFlags(1))
    with running_server(tracing=True) as running, Client(running.address) as client:
        with use_span(NonRecordingSpan(context)):
            client.generate(PROMPT, max_new_tokens=3)
            list(client.stream(PROMPT, max_new_tokens=3))
            asyncio.run(ask_asynchronously(running.address))
        client.tokenize(PROMPT)
    spans = [span for _, span in (collector.spans.get(timeout=TIMEOUT_S)
                                  for _ in range(collector.spans.qsize()))]  # fmt: skip
    calls = [span for span in spans if span.name.startswith("quill/")]
    parents = {call.name: (call.trace_id.hex(), call.parent_span_id.hex()) for call in calls}
    assert len(calls) == 4
    assert parents.pop("quill/Tokenize") != (TRACE_ID, PARENT_ID)
    assert set(parents.values()) == {(TRACE_ID, PARENT_ID)}


async def ask_asynchronously(address: str) -> None:
    async with AsyncClient(address) as client:
        await client.generate(PROMPT, max_new_tokens=3)


def test_call_becomes_spans_of_its_callers_trace(collector: Collector) -> None:
    with running_server(tracing=True) as running:
        ask(running)
    spans = collector.take()
    call = spans.pop("quill/Generate")
    assert sorted(spans) == ["decode", "prefill", "queue"]
    assert call.trace_id.hex() == TRACE_ID
    assert call.parent_span_id.hex() == PARENT_ID
    assert call.trace_state == "vendor=1"
    assert all(span.trace_id == call.trace_id for span in spans.values())
    assert all(span.parent_span_id == call.span_id for span in spans.values())
    order = [spans[name] for name in ("queue", "prefill", "decode")]
    times = [call.start_time_unix_nano]
    times += [
        time for span in order for time in (span.start_time_unix_nano, span.end_time_unix_nano)
    ]
    times.append(call.end_time_unix_nano)
    assert times == sorted(times)
    attributes = {each.key: each.value for each in call.attributes}
    assert attributes["gen_ai.usage.output_tokens"].int_value == 3
    assert attributes["gen_ai.operation.name"].string_value == "text_completion"
    assert attributes["gen_ai.request.model"].string_value == "reciter"
    (reason,) = attributes["gen_ai.response.finish_reasons"].array_value.values
    assert reason.string_value == "length"
    assert attributes["quill.outcome"].string_value == "OK"
    assert PROMPT not in str(call)


def test_failed_call_is_an_error_in_its_trace(collector: Collector) -> None:
    with running_server(tracing=True) as running, pytest.raises(grpc.RpcError):
        ask(running, top_p=7.0)
    spans = collector.take()
    (call,) = spans.values()
    assert call.status.message == "INVALID_ARGUMENT"
    assert call.trace_id.hex() == TRACE_ID


@pytest.mark.parametrize("name", ["quill", "mine"])
def test_spans_have_a_service_name(
    name: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name != "quill":
        monkeypatch.setenv("OTEL_SERVICE_NAME", name)
    with running_server(tracing=True) as running:
        ask(running)
    resource, _ = collector.spans.get(timeout=TIMEOUT_S)
    found = {each.key: each.value.string_value for each in resource.attributes}
    assert found["service.name"] == name


def test_call_without_a_key_is_in_its_callers_trace(collector: Collector, tmp_path: Path) -> None:
    add_key(tmp_path / "keys.json", "alice")
    with (
        running_server(tracing=True, api_keys=tmp_path / "keys.json") as running,
        pytest.raises(grpc.RpcError),
    ):
        ask(running)
    (call,) = collector.take().values()
    attributes = {each.key: each.value.string_value for each in call.attributes}
    assert (call.trace_id.hex(), call.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert attributes["error.type"] == "unauthenticated"
    assert attributes["gen_ai.request.model"] == "reciter"


@pytest.mark.parametrize("header", ["nonsense", f"00-{'0' * 32}-{PARENT_ID}-01", "x" * 5000])
def test_trace_that_makes_no_sense_is_left_out(header: str, collector: Collector) -> None:
    with running_server(tracing=True) as running, grpc.insecure_channel(running.address) as channel:
        stub: Any = pb_grpc.TextGenerationStub(channel)
        stub.GetModel(pb.GetModelRequest(), metadata=(("traceparent", header),), timeout=TIMEOUT_S)
    (call,) = collector.take().values()
    assert not call.parent_span_id
    assert call.trace_id.hex() != "0" * 32


def test_unsampled_trace_stays_unsampled(collector: Collector) -> None:
    header = f"00-{TRACE_ID}-{PARENT_ID}-00"
    with running_server(tracing=True) as running, grpc.insecure_channel(running.address) as channel:
        stub: Any = pb_grpc.TextGenerationStub(channel)
        stub.GetModel(pb.GetModelRequest(), metadata=(("traceparent", header),), timeout=TIMEOUT_S)
    assert not collector.take()


def test_collector_that_is_gone_is_no_concern_of_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with running_server(tracing=True) as running:
        ask(running)
