"""Who waits for a thread that compiles, and for how long."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from quill.server.errors import OverloadedError
from quill.server.grammar.job_queue import JobQueue
from quill.server.request import Constraint
from tests.server.scripted_session import TIMEOUT_S


def numbered(number: int) -> Constraint:
    return Constraint("regex", f"a{{{number}}}")


class Worked:
    """A queue with threads that work when a test lets them, and what they worked on."""

    def __init__(self, num_threads: int, max_waiting: int = 64) -> None:
        self.threads = ThreadPoolExecutor(num_threads)
        self.queue = JobQueue(self._work, self.threads, max_waiting)
        self.gates: dict[str, threading.Event] = {}
        self.done: list[str] = []

    def hold(self, owner: str) -> Future[str]:
        """Something of theirs that takes until it is released."""
        text = f"held {owner}"
        self.gates[text], begun = threading.Event(), threading.Event()
        self.gates[f"begun {text}"] = begun
        return self.queue.put(Constraint("regex", text), owner)

    def release(self, owner: str) -> None:
        self.gates[f"held {owner}"].set()

    def has_begun(self, owner: str) -> bool:
        return self.gates[f"begun held {owner}"].wait(TIMEOUT_S)

    def _work(self, constraint: Constraint) -> str:
        if gate := self.gates.get(constraint.text):
            self.gates[f"begun {constraint.text}"].set()
            assert gate.wait(TIMEOUT_S)
        self.done.append(constraint.text)
        if constraint.text == "bad":
            raise ValueError("it is bad")
        return constraint.text


@pytest.fixture
def alone() -> Iterator[Worked]:
    """With one thread."""
    worked = Worked(1, max_waiting=4)
    yield worked
    worked.threads.shutdown()


@pytest.fixture
def two() -> Iterator[Worked]:
    worked = Worked(2)
    yield worked
    worked.threads.shutdown()


def test_owners_take_turns() -> None:
    alone = Worked(1)
    alone.hold("first")
    assert alone.has_begun("first")
    futures = [alone.queue.put(numbered(n), owner) for n, owner in enumerate("aaabbc")]
    alone.release("first")
    wait(futures, TIMEOUT_S)
    order = [numbered(n).text for n in (0, 3, 5, 1, 4, 2)]
    assert alone.done[1:] == order
    alone.threads.shutdown()


def test_owner_whose_constraint_takes_long_keeps_one_thread(two: Worked) -> None:
    two.hold("attacker")
    assert two.has_begun("attacker")
    more = two.queue.put(numbered(1), "attacker")
    assert two.queue.put(numbered(2), "other").result(TIMEOUT_S) == numbered(2).text
    assert not more.done()
    two.release("attacker")
    assert more.result(TIMEOUT_S) == numbered(1).text


def test_without_owners_all_threads_are_used(two: Worked) -> None:
    two.gates["held "], two.gates["begun held "] = threading.Event(), threading.Event()
    first = two.queue.put(Constraint("regex", "held "), "")
    assert two.queue.put(numbered(1), "").result(TIMEOUT_S) == numbered(1).text
    two.release("")
    first.result(TIMEOUT_S)


def test_full_queue_is_an_error_that_says_when_to_come_again(alone: Worked) -> None:
    alone.hold("first")
    assert alone.has_begun("first")
    for number in range(2):
        alone.queue.put(numbered(number), "a")
    with pytest.raises(OverloadedError) as caught:  # the rest is for others
        alone.queue.put(numbered(2), "a")
    assert caught.value.retry_after_s > 0
    alone.queue.put(numbered(3), "b")
    alone.queue.put(numbered(4), "")  # nobody is told apart
    with pytest.raises(OverloadedError):
        alone.queue.put(numbered(5), "c")
    alone.release("first")


def test_same_constraint_is_worked_on_once_for_all_who_wait(alone: Worked) -> None:
    alone.hold("first")
    futures = [alone.queue.put(numbered(1), owner) for owner in "ab"]
    alone.release("first")
    assert [future.result(TIMEOUT_S) for future in futures] == [numbered(1).text] * 2
    assert alone.done.count(numbered(1).text) == 1
    alone.queue.put(numbered(1), "a").result(TIMEOUT_S)
    assert alone.done.count(numbered(1).text) == 2, "the queue remembers nothing"


def test_errors_reach_all_who_wait(alone: Worked) -> None:
    alone.hold("first")
    futures = [alone.queue.put(Constraint("regex", "bad"), owner) for owner in "ab"]
    alone.release("first")
    for future in futures:
        with pytest.raises(ValueError, match="it is bad"):
            future.result(TIMEOUT_S)


def test_nothing_is_done_for_those_who_have_left(alone: Worked) -> None:
    alone.hold("first")
    assert alone.has_begun("first")
    assert alone.queue.put(numbered(1), "a").cancel()
    last = alone.queue.put(numbered(2), "a")
    alone.release("first")
    last.result(TIMEOUT_S)
    assert numbered(1).text not in alone.done
