"""The newest call is started first, and none waits for long."""

import pytest

from quill.server.api import accept_queue
from quill.server.api.accept_queue import MAX_WAIT_S, WAIT_SHARE, AcceptQueue


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_newest_is_started_first(clock: Clock) -> None:
    calls = AcceptQueue[str](clock)
    for name in "abc":
        calls.put(name, None)
    assert [calls.take_newest() for _ in range(len(calls))] == ["c", "b", "a"]


def test_a_call_without_a_deadline_waits_no_longer_than_the_limit(clock: Clock) -> None:
    calls = AcceptQueue[str](clock)
    calls.put("a", None)
    clock.now_s += MAX_WAIT_S - 0.01
    assert list(calls.take_late()) == []
    clock.now_s += 0.01
    assert list(calls.take_late()) == ["a"]
    assert not calls


def test_a_short_deadline_is_late_first_whoever_came_before(clock: Clock) -> None:
    calls = AcceptQueue[str](clock)
    calls.put("patient", 60.0)
    calls.put("hasty", 0.4)
    clock.now_s += WAIT_SHARE * 0.4
    assert list(calls.take_late()) == ["hasty"]
    assert calls.take_newest() == "patient"


def test_a_call_that_was_started_is_never_late(clock: Clock) -> None:
    calls = AcceptQueue[str](clock)
    calls.put("old", None)
    calls.put("new", None)
    assert calls.take_newest() == "new"
    clock.now_s += MAX_WAIT_S
    assert list(calls.take_late()) == ["old"]
    assert list(calls.take_late()) == []


def test_what_was_started_takes_no_memory(clock: Clock) -> None:
    calls = AcceptQueue[int](clock)
    for number in range(1000):
        calls.put(number, None)
        calls.take_newest()
        list(calls.take_late())
    assert not calls._timeouts


def test_the_oldest_of_too_many_are_late(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept_queue, "MAX_WAITING", 2)
    calls = AcceptQueue[str](clock)
    for name in "abcd":
        calls.put(name, None)
    assert list(calls.take_late()) == ["a", "b"]
    assert calls.take_newest() == "d"
