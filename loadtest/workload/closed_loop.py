"""Closed-loop users: each asks, waits for the answer, and asks again.

Knows: threads, the clock. Does not know: who answers, or how.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

Ask = Callable[[Sequence[int]], int]  # a prompt; answers the number of tokens that came
IsOver = Callable[[], bool]
User = Callable[[int, IsOver], None]  # which one it is


class LoopResult(NamedTuple):
    """What a crowd was given. The time ends with the last answer, not before."""

    num_requests: int
    num_tokens: int
    seconds: float

    @property
    def tokens_a_second(self) -> float:
        return self.num_tokens / self.seconds


def closed_loop(
    ask: Ask, prompts: Sequence[Sequence[int]], num_users: int, duration_s: float
) -> LoopResult:
    """Everybody starts at once, asks once, and begins nothing new after `duration_s`."""
    counts: list[int] = []
    start_s = time.perf_counter()

    def user(number: int, is_over: IsOver) -> None:
        turn = number
        while not is_over():
            counts.append(ask(prompts[turn % len(prompts)]))
            turn += num_users
            if time.perf_counter() - start_s >= duration_s:
                return

    run_users(user, num_users)
    return LoopResult(len(counts), sum(counts), time.perf_counter() - start_s)


def run_users(user: User, num_users: int) -> None:
    """So many at once, until each is done. It is over for all when one of them fails."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            user(number, lambda: bool(errors))
        except BaseException as error:  # raised again below, in the caller's thread
            errors.append(error)

    users = [threading.Thread(target=run, args=(number,)) for number in range(num_users)]
    for each in users:
        each.start()
    for each in users:
        each.join()
    if errors:
        raise errors[0]
