"""The metrics' own numbers, as Triton has them.

Knows: the metrics' names. Does not know: who counts.
"""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry

from quill.protos import kserve_pb2 as kserve
from quill.server.kserve.model_card import VERSION

_Labels = Mapping[str, str]


class _Numbers:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._samples = [each for metric in registry.collect() for each in metric.samples]

    def total(self, name: str, counts: Callable[[_Labels], bool] = lambda _: True) -> float:
        """Over all labels that count."""
        return sum(s.value for s in self._samples if s.name == name and counts(s.labels))

    def duration(
        self, name: str, counts: Callable[[_Labels], bool] = lambda _: True
    ) -> kserve.StatisticDuration:
        count, seconds = self.total(f"{name}_count", counts), self.total(f"{name}_sum", counts)
        return kserve.StatisticDuration(count=round(count), ns=round(1e9 * seconds))


def statistics(registry: CollectorRegistry, name: str) -> kserve.ModelStatistics:
    numbers = _Numbers(registry)
    calls, steps = "quill_engine_call_seconds", "quill_step_time_seconds"
    success = numbers.duration(calls, lambda labels: labels["outcome"] == "OK")
    hits, misses = (
        kserve.StatisticDuration(count=round(numbers.total(f"quill_prefix_cache_{each}_total")))
        for each in ("hits", "misses")
    )
    return kserve.ModelStatistics(
        name=name,
        version=VERSION,
        inference_count=success.count,
        execution_count=round(numbers.total(f"{steps}_count")),
        inference_stats=kserve.InferStatistics(
            success=success,
            fail=numbers.duration(calls, lambda labels: labels["outcome"] != "OK"),
            queue=numbers.duration("quill_queue_time_seconds"),
            # perf_analyzer wants these three to count the same.
            compute_input=kserve.StatisticDuration(count=success.count),
            compute_infer=kserve.StatisticDuration(
                count=success.count, ns=numbers.duration(steps).ns
            ),
            compute_output=kserve.StatisticDuration(count=success.count),
            cache_hit=hits,
            cache_miss=misses,
        ),
    )
