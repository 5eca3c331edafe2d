"""Progress without a terminal: plain lines, not too many."""

import itertools

import pytest

from quill.model.progress import PLAIN_INTERVAL_S, Display


def test_work_within_a_step_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    ticks = itertools.count(step=PLAIN_INTERVAL_S / 4)  # each look at the clock takes that long
    with Display("run", 9, clock=lambda: next(ticks)) as display:
        assert list(display.track(list("abcdefgh"), "held-out")) == list("abcdefgh")
    assert capsys.readouterr().err == "held-out 4/8\nheld-out 8/8\n"


def test_short_work_within_a_step_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Display("run", 9, clock=lambda: 0.0) as display:
        assert list(display.track([1, 2], "held-out")) == [1, 2]
    assert capsys.readouterr().err == ""


def test_bytes_are_told_in_megabytes_with_the_time_left_and_the_end_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 0.0
    with Display("Fetching [a]", 4_000_000, in_bytes=True, clock=lambda: now) as display:
        for num_bytes in (0, 1_000_000, 3_000_000, 4_000_000, 4_000_000):
            display.update(num_bytes)
            now += PLAIN_INTERVAL_S / 2
    assert capsys.readouterr().err.splitlines() == [
        "Fetching [a] 3.0/4.0 MB  2 s left",
        "Fetching [a] 4.0/4.0 MB  0 s left",
    ]


def test_work_that_has_not_moved_yet_tells_no_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    ticks = itertools.count(step=PLAIN_INTERVAL_S)
    with Display("Fetching", 4_000_000, in_bytes=True, clock=lambda: next(ticks)) as display:
        display.update(0)
    assert capsys.readouterr().err == "Fetching 0.0/4.0 MB\n"
