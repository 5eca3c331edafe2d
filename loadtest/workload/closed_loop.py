"""Closed-loop users: each sends a request, waits for its answer, and sends the next.

Knows: threads, the clock. Does not know: servers, protocols.
"""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from quill.loadtest.errors import BackendError

Send = Callable[[Sequence[int]], int]  # sends a prompt; returns the number of tokens received
ANSWER_TIMEOUT_S = 600.0
IsOver = Callable[[], bool]
User = Callable[[int, IsOver], None]  # the user's number


class LoopResult(NamedTuple):
    """All users together. The time ends with the last answer."""

    num_requests: int
    num_tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def closed_loop(
    send: Send, prompts: Sequence[Sequence[int]], num_users: int, duration_s: float
) -> LoopResult:
    """All users start at once, send at least one request, and none after `duration_s`."""
    counts: list[int] = []
    start_s = time.perf_counter()

    def user(number: int, is_over: IsOver) -> None:
        turn = number
        while not is_over():
            counts.append(send(prompts[turn % len(prompts)]))
            turn += num_users
            if time.perf_counter() - start_s >= duration_s:
                return

    run_users(user, num_users)
    return LoopResult(len(counts), sum(counts), time.perf_counter() - start_s)


def run_users(user: User, num_users: int) -> None:
    """Runs users in threads until each returns. All end when one of them fails."""
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


class Streamed(NamedTuple):
    """One answer, as its client received it."""

    num_tokens: int
    first_token_s: float  # after the request was sent


def run_load(
    stream: Callable[[Sequence[int]], Streamed],
    prompts: Sequence[Sequence[int]],
    num_users: int,
    num_new: int,
    duration_s: float,
) -> dict[str, Any]:
    """All users stream answers of `num_new` tokens until the time is over."""
    first_tokens_s: list[float] = []

    def send(ids: Sequence[int]) -> int:
        num_tokens, first_token_s = stream(ids)
        if num_tokens < num_new:
            given = f"{num_tokens} tokens instead of {num_new}"
            raise BackendError(f"a prompt of {len(ids)} tokens was answered with {given}")
        first_tokens_s.append(first_token_s)
        return num_tokens

    served = closed_loop(send, prompts, num_users, duration_s)
    return served._asdict() | {"first_token_s": statistics.median(first_tokens_s)}
