"""A service level, and the search for the rate that meets it."""

import pytest

from quill.loadtest.errors import OptionError
from quill.loadtest.results.slo import RateTrial, Slo, best, next_rate, parse_duration_ms
from tests.loadtest.made import made

SLO = Slo.parse("ttft=500ms,gap=100ms")


@pytest.mark.parametrize(("text", "ms"), [("500ms", 500), ("2s", 2000), ("1.5m", 90_000)])
def test_durations_are_read(text: str, ms: float) -> None:
    assert parse_duration_ms(text) == ms


@pytest.mark.parametrize("text", ["", "5", "0s", "-1s", "1h", "s"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="500ms, 30s or 2m"):
        parse_duration_ms(text)


def test_unknown_limits_are_refused() -> None:
    with pytest.raises(OptionError, match="ttft, gap, tpot, total"):
        Slo.parse("latency=1s")


def test_request_is_served_well_only_if_every_limit_holds() -> None:
    assert SLO.is_met(made(first_ms=500, gap_ms=100))
    assert not SLO.is_met(made(first_ms=501, gap_ms=100))
    assert not SLO.is_met(made(arrivals_ms=(50.0, 60.0, 161.0, 170.0, 180.0)))
    assert not SLO.is_met(made(status="RESOURCE_EXHAUSTED", ok=False))
    assert SLO.share([made(), made(first_ms=900)]) == 0.5


@pytest.mark.parametrize("first", [0.5, 1.0, 64.0, 150.0])
def test_search_finds_the_highest_rate_that_is_carried(first: float) -> None:
    capacity, tried = 11.3, list[RateTrial]()
    while (rate := next_rate(tried, first)) is not None:
        assert rate not in [step.rate for step in tried]
        tried.append(RateTrial(rate, 1.0 if rate <= capacity else 0.5, rate))
    assert len(tried) < 15
    found = best(tried)
    assert found is not None
    assert capacity / 1.1 <= found.rate <= capacity


def test_search_gives_up_on_a_server_that_carries_nothing() -> None:
    tried = list[RateTrial]()
    while (rate := next_rate(tried, 1.0)) is not None:
        tried.append(RateTrial(rate, 0.0, 0.0))
    assert best(tried) is None
    assert len(tried) < 10


def test_share_of_few_requests_says_little() -> None:
    few, many = (RateTrial(1.0, 0.95, 1.0, number).share_range for number in (20, 2000))
    assert few == pytest.approx((0.7639, 0.9911), abs=1e-3)
    assert few[0] < many[0] < 0.95 < many[1] < few[1]
