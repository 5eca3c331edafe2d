"""What two looks at a server's metrics say."""

import math

import pytest
from prometheus_client import generate_latest

from quill.server.client.tools.top import (
    HEADS,
    Row,
    Window,
    buckets,
    columns,
    quantile,
    table,
)
from quill.server.outputs import EngineOutputs, QueueStats, StepStats
from quill.server.prometheus_text import Samples, read_samples
from quill.server.request import Limits
from quill.server.telemetry.call_record import Record
from quill.server.telemetry.metrics import Metrics


def scrape(metrics: Metrics) -> Samples:
    return read_samples(generate_latest(metrics.registry).decode())


def window(metrics: Metrics) -> Window:
    """All since the server's start."""
    return Window(scrape(metrics), Samples(()), 0.0, Samples(()))


def work(metrics: Metrics, num_calls: int, first_token_ms: float, num_made: int) -> None:
    for _ in range(num_calls):
        record = Record("Generate", first_token_ms=first_token_ms)
        record.close()
        metrics.finish(record)
    metrics.count("quill_generation_tokens", by=num_made)
    metrics.count("quill_prefix_cache_hits", by=num_calls)


def make_metrics() -> Metrics:
    metrics = Metrics()
    metrics.watch("quill_serving", lambda: True)
    metrics.watch("quill_requests_waiting", lambda: 7)
    labels = dict.fromkeys(("model", "family", "precision", "device", "runtime"), "")
    metrics.set_model(Limits(max_num_seqs=4, context=100, num_blocks=50), labels)
    step = StepStats(
        kind="decode", duration_s=0.01, num_tokens=1, num_draft_tokens=4, num_accepted=3
    )
    metrics.observe(
        EngineOutputs(
            events=(), step=step, queue=QueueStats(num_sequences=3, num_blocks=20, num_waiting=0)
        )
    )
    return metrics


def test_rates_and_quantiles_are_of_the_time_between_scrapes() -> None:
    metrics = make_metrics()
    work(metrics, num_calls=100, first_token_ms=8000, num_made=1000)
    before = scrape(metrics)
    work(metrics, num_calls=4, first_token_ms=20, num_made=50)
    since = Window(scrape(metrics), before, 2.0, before)
    assert columns([since]) == ["3/4", "7", "25", "18 ms / 24 ms", "–", "40%", "100%", "–"]
    ever = columns([window(metrics)])
    assert ever[2:] == ["0.0", "7.4 s / 9.7 s", "–", "40%", "100%", "75%"]


def test_quantiles_lie_within_their_buckets() -> None:
    buckets = {0.1: 10.0, 0.5: 30.0, 1.0: 30.0, math.inf: 40.0}
    assert quantile(buckets, 0.125) == pytest.approx(0.05)
    assert quantile(buckets, 0.5) == pytest.approx(0.3)
    assert quantile(buckets, 0.95) == 1.0  # beyond the last bound
    assert quantile({0.1: 0.0, math.inf: 0.0}, 0.5) is None
    assert quantile({}, 0.5) is None


def test_totals_are_of_all_servers_together() -> None:
    slow, fast = make_metrics(), make_metrics()
    work(slow, num_calls=1, first_token_ms=8000, num_made=0)
    work(fast, num_calls=19, first_token_ms=20, num_made=0)
    both = [window(slow), window(fast)]
    assert columns(both)[:2] == ["6/8", "14"]
    first_token = buckets(both, "quill_time_to_first_token_seconds")
    assert first_token[math.inf] == 20
    assert quantile(first_token, 0.94) == pytest.approx(0.01 + 0.015 * 18.8 / 19)
    assert quantile(first_token, 0.99) == pytest.approx(5 + 5 * 0.8)


def test_a_table_has_a_line_for_each_and_for_all() -> None:
    metrics = make_metrics()
    work(metrics, num_calls=2, first_token_ms=20, num_made=5)
    metrics.count("quill_prefix_cache_misses", by=2)
    one = Row("a:1", window(metrics))
    alone = table([one])
    assert len(alone) == 2
    assert alone[0].split()[0] == HEADS[0]
    head, first, away, every = table([one, Row("b:22", None, "down: nothing listens there")])
    assert first.split() == [
        *("a:1", "serving", "3/4", "7", "0.0", "18", "ms", "/", "24", "ms", "–"),
        *("40%", "50%", "75%"),
    ]
    assert away == "b:22    down: nothing listens there"
    assert every.startswith("all     1 of 2 serve")
    assert head.index("tokens/s") + len("tokens/s") == first.index("0.0") + len("0.0")
    assert table([Row("a:1", None, "away")])[1] == "a:1     away"
