"""Who is next, and that nobody waits for ever."""

from hypothesis import given
from hypothesis import strategies as st

from server.request import MAX_PRIORITY, Request
from server.waiting import PLACES_PER_LEVEL, WaitingLine


def _request(name: str, priority: int = 0) -> Request:
    return Request(request_id=name, prompt_ids=(1,), priority=priority)


def _empty(line: WaitingLine) -> list[str]:
    order = []
    while (request := line.first()) is not None:
        line.remove(request.request_id)
        order.append(request.request_id)
    return order


def test_first_come_is_first_served() -> None:
    line = WaitingLine()
    for name in "abc":
        line.add(_request(name))
    assert _empty(line) == ["a", "b", "c"]


def test_higher_priority_goes_first() -> None:
    line = WaitingLine()
    for name, priority in (("low", -1), ("normal", 0), ("high", 1), ("normal too", 0)):
        line.add(_request(name, priority))
    assert _empty(line) == ["high", "normal", "normal too", "low"]


def test_removed_request_is_never_next() -> None:
    line = WaitingLine()
    for name in "abc":
        line.add(_request(name))
    assert line.remove("a") is not None
    assert line.remove("a") is None
    assert _empty(line) == ["b", "c"]


@given(st.lists(st.integers(-MAX_PRIORITY, MAX_PRIORITY), max_size=60))
def test_nobody_is_overtaken_by_more_than_the_lead_of_priority(priorities: list[int]) -> None:
    line = WaitingLine()
    for index, priority in enumerate(priorities):
        line.add(_request(str(index), priority))
    order = [int(name) for name in _empty(line)]
    for place, index in enumerate(order):
        for later in (other for other in order[:place] if other > index):
            lead = priorities[later] - priorities[index]
            assert later - index < PLACES_PER_LEVEL * lead


def test_low_priority_gets_through_an_endless_stream_of_high_priority() -> None:
    line = WaitingLine()
    line.add(_request("patient", -MAX_PRIORITY))
    for index in range(10_000):
        line.add(_request(str(index), MAX_PRIORITY))
        first = line.first()
        assert first is not None
        line.remove(first.request_id)
        if first.request_id == "patient":
            break
    assert index <= PLACES_PER_LEVEL * 2 * MAX_PRIORITY
