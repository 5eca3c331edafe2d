"""Calls as OpenTelemetry spans, joined to the caller's own trace. Off unless asked for.

Knows: records of calls, OpenTelemetry. Does not know: gRPC, texts.

Spans are made when a call has ended, from the times that its record has anyway: nothing is
measured twice, and a server without tracing does no more than look whether it is on. Where they
go is said by OpenTelemetry's own environment variables, such as OTEL_EXPORTER_OTLP_ENDPOINT.
"""

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from quill.server.errors import StartError
from quill.server.telemetry.call_record import OPERATIONS, Record

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

HEADERS = ("traceparent", "tracestate")
_CLOSE_MS = 5000


class _Phase(NamedTuple):
    name: str
    begin_ms: float  # since the call arrived
    end_ms: float


def open_tracing() -> "Tracing":
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise StartError(
            f"--tracing needs the package {error.name}: in Quill's clone, pip install '.[tracing]'"
        ) from error
    resource = Resource.create()  # with OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "quill"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider)


class Tracing:
    """Belongs to the event loop's thread; spans are sent by another."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("quill")
        self._propagator = TraceContextTextMapPropagator()

    def report(self, record: Record) -> None:
        """A call has ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        arrived_ns = time.time_ns() - round(1e9 * (time.monotonic() - record.arrived_s))
        span = self._tracer.start_span(
            f"quill/{record.method}",
            context=self._propagator.extract(record.trace_headers),
            kind=SpanKind.SERVER,
            attributes=_attributes(record),
            start_time=arrived_ns,
        )
        if record.outcome != "OK":
            span.set_status(Status(StatusCode.ERROR, record.outcome))
        within = set_span_in_context(span)
        for phase in _phases(record):
            begin_ns, end_ns = (arrived_ns + round(1e6 * ms) for ms in phase[1:])
            child = self._tracer.start_span(phase.name, context=within, start_time=begin_ns)
            child.end(end_ns)
        span.end(arrived_ns + round(1e6 * record.total_ms))

    def close(self) -> None:
        """Sends what is left, within a few seconds."""
        self._provider.force_flush(_CLOSE_MS)
        self._provider.shutdown()


def _phases(record: Record) -> Iterator[_Phase]:
    """Of those that a request went through. A text that is only scored has no decode."""
    if record.queue_ms is None or record.submitted_s is None:
        return
    submitted_ms = 1000 * (record.submitted_s - record.arrived_s)
    started_ms = submitted_ms + record.queue_ms
    yield _Phase("queue", submitted_ms, started_ms)
    if record.first_token_ms is None:
        yield _Phase("prefill", started_ms, record.total_ms)
    else:
        first_ms = submitted_ms + record.first_token_ms
        yield _Phase("prefill", started_ms, first_ms)
        yield _Phase("decode", first_ms, max(first_ms, record.total_ms))


def _attributes(record: Record) -> Mapping[str, Any]:
    """By the semantic conventions for HTTP, RPC and generative AI; what they don't have is ours."""
    attributes: dict[str, Any] = {
        "quill.outcome": record.outcome,
        "quill.request_id": record.request_id,
        "quill.caller": record.caller,
        "error.type": None if record.outcome == "OK" else record.rejection or record.outcome,
    }
    if record.frontend == "http":
        attributes["http.route"] = record.method
    else:
        attributes |= {"rpc.system": "grpc", "rpc.method": record.method}
    if record.method in OPERATIONS:
        attributes |= {
            "gen_ai.operation.name": OPERATIONS[record.method],
            "gen_ai.provider.name": "quill",
            "gen_ai.request.model": record.model,
            "gen_ai.response.model": record.model,
            "gen_ai.response.id": record.request_id,
            "gen_ai.response.finish_reasons": tuple(record.finish_reasons),
            "gen_ai.usage.input_tokens": record.num_prompt,
            "gen_ai.usage.output_tokens": record.num_generated,
            "gen_ai.usage.cache_read.input_tokens": record.num_cached,
        }
        if record.first_token_ms is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = record.first_token_ms / 1000
    return {name: value for name, value in attributes.items() if value not in (None, "", ())}
