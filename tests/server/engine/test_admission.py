"""Who is let in, and what the others are told."""

import pytest

from quill.server.engine.dispatcher import Admission
from quill.server.errors import CancelledError, DeadlineError, OverloadedError
from quill.server.outputs import EngineOutputs, Event, FailEvent, StartEvent
from quill.server.request import Request


class Door:
    """An admission with a clock that only tests turn."""

    def __init__(self, max_waiting: int) -> None:
        self.now_s = 0.0
        self.admission = Admission(max_waiting, clock=lambda: self.now_s)

    def admit(self, name: str, deadline_s: float | None = None, owner: str = "") -> None:
        self.admission.admit(
            Request(request_id=name, prompt_ids=(1,), deadline_s=deadline_s, owner=owner)
        )

    def flood(self, owner: str) -> int:
        """How many requests of this owner are let in."""
        for number in range(1000):
            try:
                self.admit(f"{owner}-{number}", owner=owner)
            except OverloadedError:
                return number
        raise AssertionError("there is no limit")

    def tell(self, event: Event) -> None:
        self.admission.observe(EngineOutputs((event,), None))


def test_full_queue_refuses_until_somebody_leaves() -> None:
    door = Door(max_waiting=2)
    door.admit("a")
    door.admit("b")
    with pytest.raises(OverloadedError, match="2 requests are waiting") as caught:
        door.admit("c")
    assert caught.value.retry_after_s > 0
    door.tell(StartEvent("a", 0))
    door.admit("c")
    door.tell(FailEvent("b", CancelledError("left")))
    door.admit("d")
    assert door.admission.num_waiting == 2


def test_deadline_in_the_past_is_refused() -> None:
    door = Door(max_waiting=2)
    door.now_s = 5.0
    with pytest.raises(DeadlineError):
        door.admit("a", deadline_s=5.0)
    assert door.admission.num_waiting == 0


def test_deadline_that_the_queue_is_too_long_for_is_refused() -> None:
    door = Door(max_waiting=100)
    for number in range(12):
        door.admit(str(number))
    for number in range(4):
        door.now_s += 2.0
        door.tell(StartEvent(str(number), 0))
    assert door.admission.expected_wait_s() == pytest.approx(16.0)
    with pytest.raises(OverloadedError, match=r"deadline is in 15\.0 s") as caught:
        door.admit("hopeless", deadline_s=door.now_s + 15)
    assert caught.value.retry_after_s == pytest.approx(8.0)
    door.admit("hopeful", deadline_s=door.now_s + 17)


def test_quiet_times_do_not_count_as_waiting() -> None:
    door = Door(max_waiting=100)
    for number in range(5):
        door.now_s += 60.0
        door.admit(str(number))
        door.tell(StartEvent(str(number), 0))
    door.admit("waiting")
    assert door.admission.expected_wait_s() == 0


def test_nobody_with_a_name_takes_more_than_is_left_for_others() -> None:
    door = Door(max_waiting=12)
    assert door.flood("a") == 6
    assert door.flood("b") == 3
    assert door.flood("c") == 2
    assert door.flood("d") == 1
    door = Door(max_waiting=12)
    assert door.flood("") == 12, "without names there is nobody to be fair to"


def test_wait_that_is_expected_is_that_of_ones_own_turns() -> None:
    door = Door(max_waiting=100)
    for number in range(20):
        door.admit(str(number), owner="greedy")
    for number in range(10):
        door.now_s += 1.0
        door.tell(StartEvent(str(number), 0))
    assert door.admission.expected_wait_s("greedy") == pytest.approx(10.0)
    assert door.admission.expected_wait_s("modest") == pytest.approx(2.0)
    door.admit("quick", deadline_s=door.now_s + 3, owner="modest")


def test_one_long_hold_up_is_forgotten_when_requests_start_at_once_again() -> None:
    door = Door(max_waiting=100)
    door.admit("before")
    door.admit("held up")
    door.tell(StartEvent("before", 0))
    door.now_s += 58.0
    door.tell(StartEvent("held up", 0))
    door.admit("after")
    door.now_s += 0.01
    door.tell(StartEvent("after", 0))
    door.admit("one")
    door.admit("two", deadline_s=door.now_s + 5)
    assert door.admission.num_waiting == 2
