"""Metrics for Prometheus, and the same as JSON for the page's dashboard.

Knows: the engine's outputs, records of calls. Does not know: who reads the metrics, gRPC.
The names are rows of metric_table.py. `process_*` are those of the process that serves calls.
"""

import platform
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    ProcessCollector,
    Summary,
)
from prometheus_client.registry import Collector

from quill.server.errors import REJECTION_REASONS
from quill.server.outputs import (
    DiskCacheStats,
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
from quill.server.telemetry.call_record import OPERATIONS, Record
from quill.server.telemetry.merged_metrics import Family, Sample
from quill.server.telemetry.metric_table import PROBLEMS, TABLE, Row

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
# From the start at 0: `rate` doesn't see a counter's first value.
_OUTCOMES = (
    *("OK", "CANCELLED", "DEADLINE_EXCEEDED"),
    *("INTERNAL", "RESOURCE_EXHAUSTED", "UNAVAILABLE"),
)
MAX_KEYS = 32
OTHER_KEYS = "other"


class Metrics:
    """Belongs to the event loop's thread; read from the HTTP server's."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, max_keys: int = MAX_KEYS
    ) -> None:
        """`max_keys`: so many callers have their name as a label."""
        self.registry = CollectorRegistry()
        self._clock = clock
        self._max_keys = max_keys
        self._keys: set[str] = set()
        self._num_blocks = 0
        self._last_token_s: dict[tuple[str, int], float] = {}
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._times: dict[str, Histogram | Summary] = {}
        for row in TABLE:
            if not row.is_optional:
                self._make(row)
        ProcessCollector(registry=self.registry)
        self._begin_at_0()

    def _make(self, row: Row) -> None:
        given: Any = {"labelnames": row.labels, "registry": self.registry}
        if row.kind == "counter":
            self._counters[row.name] = Counter(row.name, row.help, **given)
        elif row.kind == "gauge":
            self._gauges[row.name] = Gauge(row.name, row.help, **given)
        elif row.kind == "histogram":
            self._times[row.name] = Histogram(row.name, row.help, **given, buckets=_SECONDS)
        else:
            self._times[row.name] = Summary(row.name, row.help, **given)

    def _begin_at_0(self) -> None:
        for method in OPERATIONS:
            for outcome in _OUTCOMES:
                self._counters["quill_requests"].labels(method, outcome)
        for reason in REJECTION_REASONS:
            self._counters["quill_rejections"].labels(reason)
        build = self._gauges["quill_build_info"]
        build.labels(metadata.version("quill"), platform.python_version()).set(1)

    def watch(self, name: str, value: Callable[[], float]) -> None:
        """`value` is called whenever the metrics are read, by any thread."""
        if name not in self._gauges:
            self._make(next(row for row in TABLE if row.name == name))
        self._gauges[name].set_function(value)

    def watch_health(self, has_problem: Callable[[str], bool]) -> None:
        def watch(problem: str) -> None:
            gauge = self._gauges["quill_health_problem"].labels(problem)
            gauge.set_function(lambda: has_problem(problem))

        for problem in PROBLEMS:
            watch(problem)

    def watch_engine(self, pid: Callable[[], int]) -> None:
        """Adds `quill_engine_process_*`."""
        ProcessCollector("quill_engine", pid, registry=self.registry)

    def note_restart(self) -> None:
        self.count("quill_engine_restarts")

    def set_model(self, limits: Limits, labels: Mapping[str, str]) -> None:
        """The model that serves from now on."""
        info = self._gauges["quill_model_info"]
        info.clear()
        info.labels(**labels).set(1)
        self._gauges["quill_max_num_seqs"].set(limits.max_num_seqs)
        self._gauges["quill_kv_blocks"].set(limits.num_blocks)
        self._num_blocks = limits.num_blocks

    def observe(self, batch: EngineOutputs) -> None:
        """One round of the engine."""
        if batch.step is not None:
            self._note_step(batch.step)
        if batch.queue is not None:
            gauges, queue = self._gauges, batch.queue
            gauges["quill_requests_running"].set(queue.num_requests)
            gauges["quill_sequences_running"].set(queue.num_sequences)
            gauges["quill_kv_blocks_used"].set(queue.num_blocks)
            gauges["quill_kv_cache_usage"].set(queue.num_blocks / max(1, self._num_blocks))
        if batch.disk is not None:
            self._note_disk(batch.disk)
        now_s = self._clock()
        for event in batch.events:
            self._note(event, now_s)

    def _note(self, event: Event, now_s: float) -> None:
        if isinstance(event, TokenEvent):
            self.count("quill_generation_tokens")
            self._note_token(event, now_s)
        elif isinstance(event, HypothesisEvent):
            self.count("quill_generation_tokens", by=len(event.token_ids))
        elif isinstance(event, StartEvent):
            if event.was_looked_up:
                self.count(f"quill_prefix_cache_{'hits' if event.cached else 'misses'}")
        elif isinstance(event, EmbeddingEvent):
            self.count("quill_embeddings")
        elif isinstance(event, FinishEvent):
            self._last_token_s.pop((event.request_id, event.sequence), None)
        elif isinstance(event, FailEvent):
            self._forget(event.request_id)

    def _note_step(self, step: StepStats) -> None:
        self._time("quill_step_time_seconds", step.duration_s, step.kind)
        self.count("quill_spec_draft_tokens", by=step.num_draft_tokens - step.num_jump_forward)
        self.count("quill_spec_accepted_tokens", by=step.num_accepted - step.num_jump_forward)
        self.count("quill_jump_forward_tokens", by=step.num_jump_forward)
        self.count("quill_preemptions", by=step.num_preempted)
        if step.masks_s is not None:
            self._time("quill_mask_time_seconds", step.masks_s)

    def _note_disk(self, disk: DiskCacheStats) -> None:
        for kind in ("read", "written", "dropped", "damaged"):
            by = getattr(disk, f"num_{kind}")
            self.count("quill_prefix_cache_dir_blocks", kind, by=by)
        self.count("quill_prefix_cache_dir_bytes", "read", by=disk.read_bytes)
        self.count("quill_prefix_cache_dir_bytes", "written", by=disk.written_bytes)
        self._gauges["quill_prefix_cache_dir_used_bytes"].set(disk.used_bytes)

    def _note_token(self, event: TokenEvent, now_s: float) -> None:
        key = (event.request_id, event.sequence)
        before_s = self._last_token_s.get(key)
        if before_s is not None:
            self._time("quill_inter_token_latency_seconds", now_s - before_s)
        self._last_token_s[key] = now_s

    def _forget(self, request_id: str) -> None:
        for key in [key for key in self._last_token_s if key[0] == request_id]:
            del self._last_token_s[key]

    def finish(self, record: Record) -> None:
        """A call has ended."""
        total_s = record.total_ms / 1000
        self.count("quill_requests", record.method, record.outcome)
        self._time("quill_request_time_seconds", total_s, record.method)
        if record.rejection is not None:
            self.count("quill_rejections", record.rejection)
        if record.submitted_s is not None:
            self._time("quill_engine_call_seconds", total_s, record.outcome)
        if record.outcome == "CANCELLED":
            self.count("quill_cancellations")
        self.count("quill_tokens", "prompt", by=record.num_prompt)
        self.count("quill_tokens", "cached", by=record.num_cached)
        self.count("quill_tokens", "generated", by=record.num_generated)
        if record.caller:
            self._note_key(record)
        if record.compile_ms is not None:
            self.count("quill_grammar_cache_misses")
            self._time("quill_grammar_compile_time_seconds", record.compile_ms / 1000)
        elif record.has_constraint:
            self.count("quill_grammar_cache_hits")
        if record.queue_ms is not None:
            self._time("quill_queue_time_seconds", record.queue_ms / 1000)
        if record.first_token_ms is not None:
            self._time("quill_time_to_first_token_seconds", record.first_token_ms / 1000)

    def _note_key(self, record: Record) -> None:
        key = record.caller
        if key not in self._keys:
            if len(self._keys) < self._max_keys:
                self._keys.add(key)
            else:
                key = OTHER_KEYS
        self.count("quill_key_requests", key, record.outcome)
        self.count("quill_key_tokens", key, "prompt", by=record.num_prompt)
        self.count("quill_key_tokens", key, "generated", by=record.num_generated)

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc(by)

    def _time(self, name: str, value_s: float, *labels: str) -> None:
        times = self._times[name]
        (times.labels(*labels) if labels else times).observe(value_s)


def families_of(registry: CollectorRegistry) -> list[Family]:
    """For another process."""
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [Sample(each.name, dict(each.labels), each.value) for each in metric.samples],
        )
        for metric in registry.collect()
    ]


class _Given(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def registry_of(families: list[Family]) -> CollectorRegistry:
    """That shows what other processes reported."""
    metrics = []
    for family in families:
        metric = Metric(family.name, family.help, family.kind)
        for each in family.samples:
            metric.add_sample(each.name, each.labels, each.value)
        metrics.append(metric)
    registry = CollectorRegistry()
    registry.register(_Given(metrics))
    return registry


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
