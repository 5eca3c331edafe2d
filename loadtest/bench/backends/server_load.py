"""Closed-loop users of a server, as every server backend runs them.

Knows: threads, the clock. Does not know: any server, any protocol.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from quill.loadtest.errors import BackendError
from quill.loadtest.workload.closed_loop import closed_loop

ANSWER_TIMEOUT_S = 600.0


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
