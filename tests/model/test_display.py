"""Progress without a terminal: plain lines, not too many."""

import itertools

import pytest

from model.display import PLAIN_INTERVAL_S, Display


def test_work_within_a_step_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    ticks = itertools.count(step=PLAIN_INTERVAL_S / 4)  # each look at the clock takes that long
    with Display("run", 9, clock=lambda: next(ticks)) as display:
        assert list(display.track(list("abcdefgh"), "held-out")) == list("abcdefgh")
    assert capsys.readouterr().err == "held-out 4/8\nheld-out 8/8\n"


def test_short_work_within_a_step_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Display("run", 9, clock=lambda: 0.0) as display:
        assert list(display.track([1, 2], "held-out")) == [1, 2]
    assert capsys.readouterr().err == ""
