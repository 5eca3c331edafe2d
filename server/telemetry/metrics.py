"""Numbers for Prometheus.

Knows: batches, records of calls. Does not know: who reads them, gRPC.
The names are documented in server/docs/monitoring.md: change them there too.
"""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary

from quill.server.limits import Limits
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
        registry = self.registry
        self._requests = Counter(
            "quill_requests", "Calls by how they ended", ["method", "outcome"], registry=registry
        )
        self._tokens = Counter(
            "quill_tokens",
            "Tokens of finished sequences' prompts, of those from the prefix cache, and generated",
            ["kind"],
            registry=registry,
        )
        self._made = Counter(
            "quill_generation_tokens", "Tokens, counted as they are generated", registry=registry
        )
        self._cache_hits = Counter(
            "quill_prefix_cache_hits", "Prompts with a cached prefix", registry=registry
        )
        self._cache_misses = Counter(
            "quill_prefix_cache_misses", "Prompts without a cached prefix", registry=registry
        )
        self._draft_tokens = Counter(
            "quill_spec_draft_tokens", "Draft tokens of speculative decoding", registry=registry
        )
        self._accepted_tokens = Counter(
            "quill_spec_accepted_tokens", "Draft tokens that were accepted", registry=registry
        )
        self._jump_forward = Counter(
            "quill_jump_forward_tokens", "Tokens that a grammar determined", registry=registry
        )
        self._grammar_hits = Counter(
            "quill_grammar_cache_hits", "Constraints whose grammar was cached", registry=registry
        )
        self._grammar_misses = Counter(
            "quill_grammar_cache_misses",
            "Constraints whose grammar was compiled",
            registry=registry,
        )
        self._preemptions = Counter(
            "quill_preemptions", "Requests preempted to free KV blocks", registry=registry
        )
        self._embeddings = Counter("quill_embeddings", "Texts embedded", registry=registry)
        self._cancellations = Counter(
            "quill_cancellations", "Calls whose client left", registry=registry
        )

    def _make_gauges(self) -> None:
        registry = self.registry
        self._serving = Gauge(
            "quill_serving", "1 while health says that it serves, else 0", registry=registry
        )
        self._waiting = Gauge("quill_requests_waiting", "Requests in the queue", registry=registry)
        self._requests_running = Gauge(
            "quill_requests_running", "Requests with a running sequence", registry=registry
        )
        self._sequences_running = Gauge(
            "quill_sequences_running", "Sequences that are running", registry=registry
        )
        self._max_num_seqs = Gauge(
            "quill_max_num_seqs", "Sequences that can run at once", registry=registry
        )
        self._blocks = Gauge("quill_kv_blocks", "Blocks of the KV cache", registry=registry)
        self._blocks_used = Gauge(
            "quill_kv_blocks_used", "KV blocks of running sequences", registry=registry
        )
        self._kv_cache_usage = Gauge(
            "quill_kv_cache_usage", "Share of the KV blocks in use, 0 to 1", registry=registry
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
        self._compile = histogram("quill_grammar_compile_time_seconds", "Compiling a grammar")

    def watch_health(self, is_serving: Callable[[], bool]) -> None:
        """Asked whenever the numbers are read."""
        self._serving.set_function(is_serving)

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
            self._sequences_running.set(batch.queue.num_rows)
            self._blocks_used.set(batch.queue.num_blocks)
            self._kv_cache_usage.set(batch.queue.num_blocks / max(1, self._num_blocks))
            self._waiting.set(batch.queue.num_waiting)
        now_s = self._clock()
        for event in batch.events:
            self._note(event, now_s)

    def _note(self, event: Event, now_s: float) -> None:
        if isinstance(event, TokenEvent):
            self._made.inc()
            self._note_token(event, now_s)
        elif isinstance(event, HypothesisEvent):
            self._made.inc(len(event.token_ids))
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
