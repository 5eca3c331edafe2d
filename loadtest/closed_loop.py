"""Closed-loop users: each asks, waits for the answer, and asks again.

Knows: threads, the clock. Does not know: who answers, or how.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

Ask = Callable[[Sequence[int]], int]  # a prompt; answers the number of tokens that came


class Served(NamedTuple):
    """What a crowd was given. The time ends with the last answer, not before."""

    num_requests: int
    num_tokens: int
    seconds: float

    @property
    def tokens_a_second(self) -> float:
        return self.num_tokens / self.seconds


def closed_loop(
    ask: Ask, prompts: Sequence[Sequence[int]], num_users: int, duration_s: float
) -> Served:
    """Everybody starts at once and begins nothing new after `duration_s`."""
    counts: list[int] = []
    errors: list[BaseException] = []
    start_s = time.perf_counter()

    def user(number: int) -> None:
        turn = number
        try:
            while time.perf_counter() - start_s < duration_s and not errors:
                counts.append(ask(prompts[turn % len(prompts)]))
                turn += num_users
        except BaseException as error:  # raised again below, in the caller's thread
            errors.append(error)

    users = [threading.Thread(target=user, args=(number,)) for number in range(num_users)]
    for each in users:
        each.start()
    for each in users:
        each.join()
    if errors:
        raise errors[0]
    return Served(len(counts), sum(counts), time.perf_counter() - start_s)
