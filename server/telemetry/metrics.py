"""Metrics for Prometheus, and the same as JSON for the page's dashboard.

Knows: the engine's outputs, records of calls. Does not know: who reads the metrics, gRPC.
The names are documented in server/docs/monitoring.md: change them there too.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, Summary

from quill.server.outputs import (
    EmbeddingEvent,
    EngineOutputs,
    Event,
    FailEvent,
    FinishEvent,
    HypothesisEvent,
    StartEvent,
    StepStats,
    TokenEvent,
)
from quill.server.request import Limits
from quill.server.telemetry.call_record import Record

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Belongs to the event loop's thread; read from the HTTP server's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self._clock = clock
        self._num_blocks = 0
        self._last_token_s: dict[tuple[str, int], float] = {}
        self._make_counters()
        self._make_gauges()
        self._make_histograms()

    def _make_counters(self) -> None:
        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        self._requests = counter("quill_requests", "Calls by how they ended", ["method", "outcome"])
        self._tokens = counter(
            "quill_tokens",
            "Tokens of finished sequences' prompts, of those from the prefix cache, and generated",
            ["kind"],
        )
        self._generated = counter(
            "quill_generation_tokens", "Tokens, counted as they are generated"
        )
        self._cache_hits = counter("quill_prefix_cache_hits", "Prompts with a cached prefix")
        self._cache_misses = counter("quill_prefix_cache_misses", "Prompts without a cached prefix")
        self._draft_tokens = counter(
            "quill_spec_draft_tokens", "Draft tokens of speculative decoding"
        )
        self._accepted_tokens = counter(
            "quill_spec_accepted_tokens", "Draft tokens that were accepted"
        )
        self._jump_forward = counter(
            "quill_jump_forward_tokens", "Tokens that a grammar determined"
        )
        self._grammar_hits = counter(
            "quill_grammar_cache_hits", "Constraints that had compiled before"
        )
        self._grammar_misses = counter(
            "quill_grammar_cache_misses", "Constraints that the grammar worker compiled"
        )
        self._preemptions = counter("quill_preemptions", "Requests preempted to free KV blocks")
        self._embeddings = counter("quill_embeddings", "Texts embedded")
        self._restarts = counter("quill_engine_restarts", "Ends of the engine's process")
        self._cancellations = counter("quill_cancellations", "Calls whose client left")

    def _make_gauges(self) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, registry=self.registry)

        self._serving = gauge("quill_serving", "1 while health says that it serves, else 0")
        self._waiting = gauge("quill_requests_waiting", "Requests in the queue")
        self._requests_running = gauge("quill_requests_running", "Requests with a running sequence")
        self._sequences_running = gauge("quill_sequences_running", "Sequences that are running")
        self._max_num_seqs = gauge("quill_max_num_seqs", "Sequences that can run at once")
        self._blocks = gauge("quill_kv_blocks", "Blocks of the KV cache")
        self._blocks_used = gauge("quill_kv_blocks_used", "KV blocks of running sequences")
        self._kv_cache_usage = gauge(
            "quill_kv_cache_usage", "Share of the KV blocks in use, 0 to 1"
        )

    def _make_histograms(self) -> None:
        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(name, text, labels, registry=self.registry, buckets=_SECONDS)

        self._first_token = histogram(
            "quill_time_to_first_token_seconds", "From arrival to the first token"
        )
        self._between = histogram(
            "quill_inter_token_latency_seconds", "Between two tokens of a sequence"
        )
        self._queue = histogram("quill_queue_time_seconds", "From arrival to the first step")
        self._total = histogram("quill_request_time_seconds", "From arrival to the end", "method")
        self._engine_calls = Summary(
            "quill_engine_call_seconds",
            "Calls that the engine worked for, from arrival to end, by how they ended",
            ["outcome"],
            registry=self.registry,
        )
        self._step = histogram("quill_step_time_seconds", "One step of the engine", "kind")
        self._masks = histogram(
            "quill_mask_time_seconds", "All grammar masks of a step, computed beside the model"
        )
        self._compile = histogram(
            "quill_grammar_compile_time_seconds", "A constraint in the grammar worker and its queue"
        )

    def watch_health(self, is_serving: Callable[[], bool]) -> None:
        """`is_serving` is called whenever the metrics are read."""
        self._serving.set_function(is_serving)

    def note_restart(self) -> None:
        self._restarts.inc()

    def set_limits(self, limits: Limits) -> None:
        self._max_num_seqs.set(limits.max_num_seqs)
        self._blocks.set(limits.num_blocks)
        self._num_blocks = limits.num_blocks

    def observe(self, batch: EngineOutputs) -> None:
        """One round of the engine."""
        if batch.step is not None:
            self._note_step(batch.step)
        if batch.queue is not None:
            self._requests_running.set(batch.queue.num_requests)
            self._sequences_running.set(batch.queue.num_sequences)
            self._blocks_used.set(batch.queue.num_blocks)
            self._kv_cache_usage.set(batch.queue.num_blocks / max(1, self._num_blocks))
            self._waiting.set(batch.queue.num_waiting)
        now_s = self._clock()
        for event in batch.events:
            self._note(event, now_s)

    def _note(self, event: Event, now_s: float) -> None:
        if isinstance(event, TokenEvent):
            self._generated.inc()
            self._note_token(event, now_s)
        elif isinstance(event, HypothesisEvent):
            self._generated.inc(len(event.token_ids))
        elif isinstance(event, StartEvent):
            if event.was_looked_up:
                (self._cache_hits if event.cached else self._cache_misses).inc()
        elif isinstance(event, EmbeddingEvent):
            self._embeddings.inc()
        elif isinstance(event, FinishEvent):
            self._last_token_s.pop((event.request_id, event.sequence), None)
        elif isinstance(event, FailEvent):
            self._forget(event.request_id)

    def _note_step(self, step: StepStats) -> None:
        self._step.labels(step.kind).observe(step.duration_s)
        self._draft_tokens.inc(step.num_draft_tokens - step.num_jump_forward)
        self._accepted_tokens.inc(step.num_accepted - step.num_jump_forward)
        self._jump_forward.inc(step.num_jump_forward)
        self._preemptions.inc(step.num_preempted)
        if step.masks_s is not None:
            self._masks.observe(step.masks_s)

    def _note_token(self, event: TokenEvent, now_s: float) -> None:
        key = (event.request_id, event.sequence)
        before_s = self._last_token_s.get(key)
        if before_s is not None:
            self._between.observe(now_s - before_s)
        self._last_token_s[key] = now_s

    def _forget(self, request_id: str) -> None:
        for key in [key for key in self._last_token_s if key[0] == request_id]:
            del self._last_token_s[key]

    def finish(self, record: Record) -> None:
        """A call has ended."""
        self._requests.labels(record.method, record.outcome).inc()
        self._total.labels(record.method).observe(record.total_ms / 1000)
        if record.submitted_s is not None:
            self._engine_calls.labels(record.outcome).observe(record.total_ms / 1000)
        if record.outcome == "CANCELLED":
            self._cancellations.inc()
        self._tokens.labels("prompt").inc(record.num_prompt)
        self._tokens.labels("cached").inc(record.num_cached)
        self._tokens.labels("generated").inc(record.num_generated)
        if record.compile_ms is not None:
            self._grammar_misses.inc()
            self._compile.observe(record.compile_ms / 1000)
        elif record.has_constraint:
            self._grammar_hits.inc()
        if record.queue_ms is not None:
            self._queue.observe(record.queue_ms / 1000)
        if record.first_token_ms is not None:
            self._first_token.observe(record.first_token_ms / 1000)


def stats(registry: CollectorRegistry) -> dict[str, Any]:
    """All values as JSON, for the page's dashboard. `time_s`: by the clock of time.monotonic."""
    metrics = {metric.name: _values(metric) for metric in registry.collect()}
    return {"time_s": time.monotonic(), "metrics": metrics}


def _values(metric: Metric) -> list[dict[str, Any]]:
    """One for each set of labels: a value, or a histogram with its buckets up to each bound."""
    found: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
    for sample in metric.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        one = found.setdefault(tuple(labels.items()), {"labels": labels})
        if sample.name.endswith("_bucket"):
            if sample.labels["le"] != "+Inf":  # that is the count, and JSON can't write it
                one.setdefault("buckets", []).append([float(sample.labels["le"]), sample.value])
        elif sample.name.endswith("_sum"):
            one["sum"] = sample.value
        elif sample.name.endswith("_count"):
            one["count"] = sample.value
        elif not sample.name.endswith("_created"):
            one["value"] = sample.value
    return list(found.values())
