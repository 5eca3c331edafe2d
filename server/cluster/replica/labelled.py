"""Metrics that say which replica they are of.

Knows: Prometheus' samples. Does not know: what is counted.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector


class _Labelled(Collector):
    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        self._registry = registry
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            labelled = Metric(metric.name, metric.documentation, metric.type, metric.unit)
            labelled.samples = [
                sample._replace(labels={**sample.labels, **self._labels})
                for sample in metric.samples
            ]
            yield labelled


def labelled(registry: CollectorRegistry, **labels: str) -> CollectorRegistry:
    """The same numbers, as they are whenever somebody looks."""
    other = CollectorRegistry()
    other.register(_Labelled(registry, labels))
    return other
