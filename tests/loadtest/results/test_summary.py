"""A run in numbers."""

import pytest

from quill.loadtest.results.slo import Slo
from quill.loadtest.results.summary import summarize, table
from tests.loadtest.made import made

RUN = [made(index, first_ms=100.0 * (index + 1)) for index in range(10)]


def test_rates_are_over_the_whole_run() -> None:
    summary = summarize(RUN)
    # From the first one's start to the end of the last, which began at 0.9 s and took 1.041 s.
    assert summary.wall_s == pytest.approx(1.941)
    assert summary.tokens_per_s == pytest.approx(50 / 1.941)
    assert summary.requests_per_s == pytest.approx(10 / 1.941)
    assert summary.cached_share == 0.25


def test_percentiles_are_of_all_values() -> None:
    p50, p90, p95, p99, largest = summarize(RUN).percentiles_ms["time to first token"]
    assert (p50, largest) == (550, 1000)
    assert p50 < p90 < p95 < p99 < largest


def test_errors_are_counted_by_status_and_expected_ends_are_none() -> None:
    summary = summarize(
        [made(), made(1, status="UNAVAILABLE", ok=False), made(2, status="CANCELLED")]
    )
    assert summary.errors == {"UNAVAILABLE": 1}
    assert summary.statuses == {"CANCELLED": 1, "OK": 1, "UNAVAILABLE": 1}


def test_goodput_counts_what_was_served_well() -> None:
    summary = summarize(RUN, Slo.parse("ttft=500ms"))
    assert summary.slo_share == 0.5
    assert summary.goodput == pytest.approx(5 / 1.941)


def test_run_without_any_token_has_no_percentiles() -> None:
    nothing = made(
        status="UNAVAILABLE", ok=False, first_token_ms=None, token_ids=(), arrivals_ms=()
    )
    summary = summarize([nothing])
    assert summary.percentiles_ms["time to first token"] == ()
    assert table(summary)[1] == ["time to first token", "–", "–", "–", "–", "–"]
