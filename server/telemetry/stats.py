"""The same numbers that Prometheus gets, as JSON: for the page's dashboard.

Knows: prometheus_client's samples. Does not know: what is counted, who reads it.
"""

import time
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric


def stats(registry: CollectorRegistry) -> dict[str, Any]:
    """`time_s` is for differences: it is the clock of time.monotonic."""
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
