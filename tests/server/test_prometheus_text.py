"""A page that prometheus_client wrote is read back."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from quill.server.prometheus_text import Samples, read_samples


def page() -> Samples:
    registry = CollectorRegistry()
    Gauge("depth", "Of a queue", registry=registry).set(2.5)
    calls = Counter("calls", "By how they ended", ["method", "outcome"], registry=registry)
    calls.labels("A", "OK").inc(3)
    calls.labels("A", 'a "quoted", text').inc(4)
    times = Histogram("time_seconds", "Of a call", ["method"], registry=registry, buckets=(1, 2))
    for method, seconds in (("A", 0.5), ("B", 1.5), ("B", 9.0)):
        times.labels(method).observe(seconds)
    return read_samples(generate_latest(registry).decode())


def test_a_value_is_the_sum_over_the_label_sets_that_match() -> None:
    samples = page()
    assert samples.value("depth") == 2.5
    assert samples.value("calls_total") == 7
    assert samples.value("calls_total", outcome="OK") == 3
    assert samples.value("calls_total", outcome="OK", method="B") == 0
    assert samples.value("missing") == 0
    assert ("depth" in samples, "missing" in samples) == (True, False)


def test_buckets_are_cumulative_and_end_with_infinity() -> None:
    samples = page()
    assert samples.buckets("time_seconds") == {1.0: 1, 2.0: 2, float("inf"): 3}
    assert samples.value("time_seconds_count") == 3
    assert samples.buckets("missing") == {}
