"""The metrics as JSON."""

import json

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from quill.server.telemetry.stats import stats


def test_values_are_told_by_label_and_histograms_with_their_buckets() -> None:
    registry = CollectorRegistry()
    Gauge("depth", "", registry=registry).set(3)
    counter = Counter("calls", "", ["method", "outcome"], registry=registry)
    counter.labels("a", "OK").inc(2)
    counter.labels("b", "OK").inc()
    times = Histogram("time_seconds", "", ["kind"], registry=registry, buckets=(0.5, 1))
    for value in (0.1, 0.7, 4.0):
        times.labels("x").observe(value)
    said = json.loads(json.dumps(stats(registry), allow_nan=False))
    assert said["time_s"] > 0
    assert said["metrics"]["depth"] == [{"labels": {}, "value": 3}]
    assert said["metrics"]["calls"] == [
        {"labels": {"method": "a", "outcome": "OK"}, "value": 2},
        {"labels": {"method": "b", "outcome": "OK"}, "value": 1},
    ]
    (one,) = said["metrics"]["time_seconds"]
    assert (one["labels"], one["count"], one["buckets"]) == ({"kind": "x"}, 3, [[0.5, 1], [1, 2]])
    assert abs(one["sum"] - 4.8) < 1e-9
