"""Who is next, and that nobody waits for ever."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quill.server.engine.fair_queue import PLACES_PER_LEVEL, FairQueue
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


def _empty(queue: FairQueue) -> list[str]:
    order = []
    while queue.in_order(1):
        (request,) = queue.in_order(1)
        queue.remove(request.request_id)
        order.append(request.request_id)
    return order


@pytest.mark.parametrize(
    ("requests", "order"),
    [
        ([_request(name) for name in "abc"], "a b c"),
        (
            [_request("low", -1), _request("normal"), _request("high", 1), _request("too")],
            "high normal too low",
        ),
        (
            [
                *(_request(name, owner="a", num_sequences=3) for name in ("a0", "a1")),
                *(_request(f"b{number}", owner="b") for number in range(4)),
            ],
            "a0 b0 b1 b2 a1 b3",
        ),
        (
            [
                _request("a1", 0, "a"),
                _request("b", 0, "b"),
                _request("a2", 0, "a"),
                _request("a3", 5, "a"),
            ],
            "a3 b a1 a2",
        ),
        (
            [_request(f"long{number}", owner="a", num_prompt=4000) for number in range(3)]
            + [_request(str(number), owner="b", num_prompt=10) for number in range(40)],
            f"long0 {' '.join(map(str, range(40)))} long1 long2",
        ),
    ],
    ids=["arrival", "priority", "sequences", "priority within an owner", "tokens"],
)
def test_owners_take_turns_by_cost_and_each_goes_by_priority(
    requests: list[Request], order: str
) -> None:
    queue = FairQueue()
    for request in requests:
        queue.add(request)
    assert _empty(queue) == order.split()


def test_removed_request_is_never_next() -> None:
    queue = FairQueue()
    for name in "abc":
        queue.add(_request(name))
    assert queue.remove("a") is not None
    assert queue.remove("a") is None
    assert _empty(queue) == ["b", "c"]


@settings(deadline=None)
@given(st.lists(st.integers(-MAX_PRIORITY, MAX_PRIORITY), max_size=60))
def test_nobody_is_overtaken_by_more_than_the_lead_of_priority(priorities: list[int]) -> None:
    queue = FairQueue()
    for index, priority in enumerate(priorities):
        queue.add(_request(str(index), priority))
    order = [int(name) for name in _empty(queue)]
    for place, index in enumerate(order):
        for later in (other for other in order[:place] if other > index):
            lead = priorities[later] - priorities[index]
            assert later - index < PLACES_PER_LEVEL * lead


def _take(queue: FairQueue) -> Request:
    (request,) = queue.in_order(1)
    queue.serve(request)
    return request


def test_owners_take_turns_whoever_sent_more() -> None:
    queue = FairQueue()
    for number in range(5):
        queue.add(_request(f"a{number}", owner="a"))
    assert _take(queue).request_id == "a0"
    for number in range(2):
        queue.add(_request(f"b{number}", owner="b"))
    assert _empty(queue) == ["b0", "a1", "b1", "a2", "a3", "a4"], "the newcomer first"


def test_backlog_that_was_served_is_not_held_against_its_owner() -> None:
    queue = FairQueue()
    for number in range(9):
        queue.add(_request(f"old{number}", owner="a"))
    _empty(queue)
    queue.add(_request("a", owner="a"))
    queue.add(_request("b", owner="b"))
    assert _empty(queue) == ["a", "b"]


# An owner's number: a request of that owner comes. None: the next one starts.
_Days = st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=120)


@settings(deadline=None)
@given(_Days)
def test_owners_who_wait_together_are_served_alike(day: list[int | None]) -> None:
    """From the moment that two wait until one doesn't, neither gets two more than the other."""
    queue, waiting, num_served = FairQueue(), Counter[int](), Counter[int]()
    since: dict[tuple[int, int], int] = {}  # the lead when both began to wait
    for index, owner in enumerate([*day, *[None] * len(day)]):
        if owner is not None:
            queue.add(_request(str(index), owner=str(owner)))
            waiting[owner] += 1
        elif len(queue):
            served = int(_take(queue).owner)
            waiting[served] -= 1
            num_served[served] += 1
        for a in range(4):
            for b in range(a):
                lead = num_served[a] - num_served[b]
                if waiting[a] and waiting[b]:
                    assert abs(lead - since.setdefault((a, b), lead)) <= 2
                else:
                    since.pop((a, b), None)
    assert not len(queue)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-MAX_PRIORITY, MAX_PRIORITY)), max_size=40)
)
def test_nobody_starves_whatever_others_send(others: list[tuple[int, int]]) -> None:
    """All others go on for ever with the highest priority; everybody who waited gets through."""
    queue = FairQueue()
    for index, (owner, priority) in enumerate(others):
        queue.add(_request(f"early-{index}", priority, str(owner)))
    num_left = len(others)
    most = (len(others) + PLACES_PER_LEVEL * 2 * MAX_PRIORITY + 1) * 5
    for index in range(most):
        for owner in range(5):
            if index % 5 == owner:
                queue.add(_request(f"late-{index}", MAX_PRIORITY, str(owner)))
        num_left -= _take(queue).request_id.startswith("early")
        if not num_left:
            break
    assert not num_left


def test_whoever_calls_everything_urgent_makes_nobody_else_wait() -> None:
    queue = FairQueue()
    for index in range(100):
        queue.add(_request(f"a{index}", MAX_PRIORITY, "a"))
    queue.add(_request("b", 0, "b"))
    assert [_take(queue).owner for _ in range(2)].count("b") == 1
    for index in range(1000):
        queue.add(_request(f"c{index}", MAX_PRIORITY, "c"))
        queue.add(_request(f"d{index}", 0, "d"))
    served = Counter(_take(queue).owner for _ in range(600))
    assert abs(served["c"] - served["d"]) <= 1


def test_newcomer_goes_before_the_owner_that_was_just_served() -> None:
    queue = FairQueue()
    for number in range(3):
        queue.add(_request(f"a{number}", owner="a", num_prompt=4000))
    assert _take(queue).request_id == "a0"
    queue.add(_request("b", owner="b"))
    assert _take(queue).request_id == "b"
