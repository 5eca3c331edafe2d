"""When an open loop's requests start."""

from itertools import islice, pairwise, takewhile

import pytest

from quill.loadtest.workload.schedule import arrivals


def count(seconds: float, rate: float, ramp_s: float = 0.0, seed: int = 0) -> int:
    return sum(1 for _ in takewhile(lambda at_s: at_s < seconds, arrivals(seed, 0, rate, ramp_s)))


def test_arrivals_come_at_the_rate() -> None:
    assert count(1000, rate=5) == pytest.approx(5000, rel=0.05)


def test_gaps_are_those_of_a_poisson_process() -> None:
    times = list(islice(arrivals(0, 0, 2.0), 20_000))
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(0.5, rel=0.03)
    assert variance == pytest.approx(mean**2, rel=0.1)


def test_ramp_grows_evenly_and_then_holds() -> None:
    assert count(50, rate=100, ramp_s=100) == pytest.approx(1250, rel=0.1)
    assert count(100, rate=100, ramp_s=100) == pytest.approx(5000, rel=0.1)
    assert count(200, rate=100, ramp_s=100) == pytest.approx(15_000, rel=0.1)
    times = list(islice(arrivals(0, 0, 10.0, 20.0), 500))
    assert times == sorted(times)


def test_same_seed_gives_the_same_times_and_other_parts_others() -> None:
    first, again, other = (list(islice(arrivals(3, part, 1.0), 20)) for part in (0, 0, 1))
    assert first == again
    assert not set(first) & set(other)
