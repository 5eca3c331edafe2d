"""Who is next, and that nobody waits for ever."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from quill.server.engine.fair_queue import PLACES_PER_LEVEL, RequestQueue
from quill.server.fields import MAX_PRIORITY
from quill.server.request import Request


def _request(
    name: str, priority: int = 0, owner: str = "", num_sequences: int = 1, num_prompt: int = 1
) -> Request:
    return Request(
        request_id=name,
        prompt_ids=(1,) * num_prompt,
        priority=priority,
        owner=owner,
        num_sequences=num_sequences,
    )


def _empty(line: RequestQueue) -> list[str]:
    order = []
    while (request := line.first()) is not None:
        line.remove(request.request_id)
        order.append(request.request_id)
    return order


def test_first_come_is_first_served() -> None:
    line = RequestQueue()
    for name in "abc":
        line.add(_request(name))
    assert _empty(line) == ["a", "b", "c"]


def test_higher_priority_goes_first() -> None:
    line = RequestQueue()
    for name, priority in (("low", -1), ("normal", 0), ("high", 1), ("normal too", 0)):
        line.add(_request(name, priority))
    assert _empty(line) == ["high", "normal", "normal too", "low"]


def test_removed_request_is_never_next() -> None:
    line = RequestQueue()
    for name in "abc":
        line.add(_request(name))
    assert line.remove("a") is not None
    assert line.remove("a") is None
    assert _empty(line) == ["b", "c"]


@settings(deadline=None)
@given(st.lists(st.integers(-MAX_PRIORITY, MAX_PRIORITY), max_size=60))
def test_nobody_is_overtaken_by_more_than_the_lead_of_priority(priorities: list[int]) -> None:
    line = RequestQueue()
    for index, priority in enumerate(priorities):
        line.add(_request(str(index), priority))
    order = [int(name) for name in _empty(line)]
    for place, index in enumerate(order):
        for later in (other for other in order[:place] if other > index):
            lead = priorities[later] - priorities[index]
            assert later - index < PLACES_PER_LEVEL * lead


def test_low_priority_gets_through_an_endless_stream_of_high_priority() -> None:
    line = RequestQueue()
    line.add(_request("patient", -MAX_PRIORITY))
    for index in range(10_000):
        line.add(_request(str(index), MAX_PRIORITY))
        first = line.first()
        assert first is not None
        line.remove(first.request_id)
        if first.request_id == "patient":
            break
    assert index <= PLACES_PER_LEVEL * 2 * MAX_PRIORITY


def _take(line: RequestQueue) -> Request:
    request = line.first()
    assert request is not None
    line.serve(request)
    return request


def test_owners_take_turns_whoever_sent_more() -> None:
    line = RequestQueue()
    for number in range(5):
        line.add(_request(f"a{number}", owner="a"))
    assert _take(line).request_id == "a0"
    for number in range(2):
        line.add(_request(f"b{number}", owner="b"))
    assert _empty(line) == ["b0", "a1", "b1", "a2", "a3", "a4"], "the newcomer first"


def test_several_sequences_cost_as_many_turns() -> None:
    line = RequestQueue()
    for number in range(2):
        line.add(_request(f"a{number}", owner="a", num_sequences=3))
    for number in range(4):
        line.add(_request(f"b{number}", owner="b"))
    assert _empty(line) == ["a0", "b0", "b1", "b2", "a1", "b3"]


def test_backlog_that_was_served_is_not_held_against_its_owner() -> None:
    line = RequestQueue()
    for number in range(9):
        line.add(_request(f"old{number}", owner="a"))
    _empty(line)
    line.add(_request("a", owner="a"))
    line.add(_request("b", owner="b"))
    assert _empty(line) == ["a", "b"]


# An owner's number: a request of that owner comes. None: the next one starts.
_Days = st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=120)


@settings(deadline=None)
@given(_Days)
def test_owners_who_wait_together_are_served_alike(day: list[int | None]) -> None:
    """From the moment that two wait until one doesn't, neither gets two more than the other."""
    line, waiting, num_served = RequestQueue(), Counter[int](), Counter[int]()
    since: dict[tuple[int, int], int] = {}  # the lead when both began to wait
    for index, owner in enumerate([*day, *[None] * len(day)]):
        if owner is not None:
            line.add(_request(str(index), owner=str(owner)))
            waiting[owner] += 1
        elif len(line):
            served = int(_take(line).owner)
            waiting[served] -= 1
            num_served[served] += 1
        for a in range(4):
            for b in range(a):
                lead = num_served[a] - num_served[b]
                if waiting[a] and waiting[b]:
                    assert abs(lead - since.setdefault((a, b), lead)) <= 2
                else:
                    since.pop((a, b), None)
    assert not len(line)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-MAX_PRIORITY, MAX_PRIORITY)), max_size=40)
)
def test_nobody_starves_whatever_others_send(others: list[tuple[int, int]]) -> None:
    """All others go on for ever with the highest priority; everybody who waited gets through."""
    line = RequestQueue()
    for index, (owner, priority) in enumerate(others):
        line.add(_request(f"early-{index}", priority, str(owner)))
    num_left = len(others)
    most = (len(others) + PLACES_PER_LEVEL * 2 * MAX_PRIORITY + 1) * 5
    for index in range(most):
        for owner in range(5):
            if index % 5 == owner:
                line.add(_request(f"late-{index}", MAX_PRIORITY, str(owner)))
        num_left -= _take(line).request_id.startswith("early")
        if not num_left:
            break
    assert not num_left


def test_whoever_calls_everything_urgent_makes_nobody_else_wait() -> None:
    line = RequestQueue()
    for index in range(100):
        line.add(_request(f"a{index}", MAX_PRIORITY, "a"))
    line.add(_request("b", 0, "b"))
    assert [_take(line).owner for _ in range(2)].count("b") == 1
    for index in range(1000):
        line.add(_request(f"c{index}", MAX_PRIORITY, "c"))
        line.add(_request(f"d{index}", 0, "d"))
    served = Counter(_take(line).owner for _ in range(600))
    assert abs(served["c"] - served["d"]) <= 1


def test_urgent_request_goes_before_its_owners_others() -> None:
    line = RequestQueue()
    for name, priority, owner in (("a1", 0, "a"), ("b1", 0, "b"), ("a2", 0, "a"), ("a3", 5, "a")):
        line.add(_request(name, priority, owner))
    assert _empty(line) == ["a3", "b1", "a1", "a2"]


def test_owners_take_turns_by_tokens() -> None:
    line = RequestQueue()
    for number in range(3):
        line.add(_request(f"long{number}", owner="a", num_prompt=4000))
    for number in range(40):
        line.add(_request(f"{number}", owner="b", num_prompt=10))
    assert _empty(line) == ["long0", *map(str, range(40)), "long1", "long2"]


def test_newcomer_goes_before_the_owner_that_was_just_served() -> None:
    line = RequestQueue()
    for number in range(3):
        line.add(_request(f"a{number}", owner="a", num_prompt=4000))
    assert _take(line).request_id == "a0"
    line.add(_request("b", owner="b"))
    assert _take(line).request_id == "b"


def test_who_was_set_back_goes_first_the_oldest_before_the_younger() -> None:
    line = RequestQueue()
    for name in "abc":
        line.add(_request(name))
    a, b = _take(line), _take(line)
    line.put_back(b)
    line.put_back(a)
    assert len(line) == 3
    assert [request.request_id for request in line.in_order(2)] == ["a", "b"]
    assert _empty(line) == ["a", "b", "c"]
