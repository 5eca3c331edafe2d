"""What two looks at a server's metrics say."""

import math

import pytest
from prometheus_client import generate_latest

from quill.server.client.top.numbers import numbers, quantile, share, total
from quill.server.client.top.page import Look, PageError, read_page
from quill.server.client.top.table import HEADS, Row, table
from quill.server.limits import Limits
from quill.server.outputs import EngineOutputs, QueueStats, StepStats
from quill.server.telemetry.call_record import Record
from quill.server.telemetry.metrics import Metrics


def seen(metrics: Metrics, at_s: float) -> Look:
    return read_page(generate_latest(metrics.registry).decode(), at_s)


def work(metrics: Metrics, num_calls: int, first_token_ms: float, num_made: int) -> None:
    for _ in range(num_calls):
        record = Record("Generate", first_token_ms=first_token_ms)
        record.close()
        metrics.finish(record)
    metrics._generated.inc(num_made)
    metrics._cache_hits.inc(num_calls)


def make_metrics() -> Metrics:
    metrics = Metrics()
    metrics.watch_health(lambda: True)
    metrics.set_limits(Limits(max_num_seqs=4, context=100, num_blocks=50))
    step = StepStats(
        kind="decode", duration_s=0.01, num_tokens=1, num_draft_tokens=4, num_accepted=3
    )
    metrics.observe(
        EngineOutputs(
            events=(), step=step, queue=QueueStats(num_sequences=3, num_blocks=20, num_waiting=7)
        )
    )
    return metrics


def test_rates_and_quantiles_are_of_the_time_between_looks() -> None:
    metrics = make_metrics()
    work(metrics, num_calls=100, first_token_ms=8000, num_made=1000)
    before = seen(metrics, 10.0)
    work(metrics, num_calls=4, first_token_ms=20, num_made=50)
    found = numbers(seen(metrics, 12.0), before, before)
    assert (found.running, found.max_num_seqs, found.waiting, found.serving) == (3, 4, 7, 1)
    assert (found.held, found.blocks) == (20, 50)
    assert found.tokens_per_s == 25.0
    assert (found.hits, found.misses) == (4, 0)
    assert quantile(found.first_token, 0.5) == pytest.approx(0.0175)  # in the middle of its bucket
    assert quantile(found.gap, 0.5) is None
    ever = numbers(seen(metrics, 12.0), before, None)
    assert (ever.hits, ever.draft, ever.accepted) == (104, 4, 3)
    assert quantile(ever.first_token, 0.5) == pytest.approx(5 + 5 * 48 / 100)


def test_quantiles_lie_within_their_buckets() -> None:
    buckets = {0.1: 10.0, 0.5: 30.0, 1.0: 30.0, math.inf: 40.0}
    assert quantile(buckets, 0.125) == pytest.approx(0.05)
    assert quantile(buckets, 0.5) == pytest.approx(0.3)
    assert quantile(buckets, 0.95) == 1.0  # beyond the last bound
    assert quantile({0.1: 0.0, math.inf: 0.0}, 0.5) is None
    assert quantile({}, 0.5) is None
    assert share(1, 3) == 0.25
    assert share(0, 0) is None


def test_totals_are_of_all_servers_together() -> None:
    slow, fast = make_metrics(), make_metrics()
    work(slow, num_calls=1, first_token_ms=8000, num_made=0)
    work(fast, num_calls=19, first_token_ms=20, num_made=0)
    both = [numbers(seen(each, 1.0), None, None) for each in (slow, fast)]
    every = total(both)
    assert (every.running, every.max_num_seqs, every.waiting, every.serving) == (6, 8, 14, 2)
    assert every.hits == 20
    assert quantile(every.first_token, 0.94) == pytest.approx(0.01 + 0.015 * 18.8 / 19)
    assert quantile(every.first_token, 0.99) == pytest.approx(5 + 5 * 0.8)


def test_a_table_has_a_line_for_each_and_for_all() -> None:
    metrics = make_metrics()
    work(metrics, num_calls=2, first_token_ms=20, num_made=5)
    metrics._cache_misses.inc(2)
    one = Row("a:1", numbers(seen(metrics, 1.0), None, None))
    alone = table([one])
    assert len(alone) == 2
    assert alone[0].split()[0] == HEADS[0]
    head, first, away, every = table([one, Row("b:22", None, "away: nobody listens there")])
    assert first.split() == [
        *("a:1", "serving", "3/4", "7", "0.0", "18", "ms", "/", "24", "ms", "–"),
        *("40%", "50%", "75%"),
    ]
    assert away == "b:22    away: nobody listens there"
    assert every.startswith("all     1 of 2 serve")
    assert head.index("tokens/s") + len("tokens/s") == first.index("0.0") + len("0.0")
    assert table([Row("a:1", None, "away")])[1] == "a:1     away"


@pytest.mark.parametrize("text", ["", "<html>", "up 1\n", "# HELP quill_serving x\n"])
def test_other_pages_are_not_a_servers(text: str) -> None:
    with pytest.raises(PageError, match="isn't a Quill server's"):
        read_page(text, 0.0)
