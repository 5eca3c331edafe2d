"""Decides at the door whether a request may join the queue.

Knows: how many wait, how fast they start. Does not know: steps, slots, gRPC.

Belongs to the event loop's thread, so that a refusal needn't wait for the step under way. It
learns from the engine's batches who has started.
"""

import time
from collections.abc import Callable

from server.errors import DeadlineError, OverloadedError
from server.events import Batch, FailEvent, StartEvent
from server.request import Request


class Admission:
    """A bounded queue, seen from outside."""

    def __init__(self, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_waiting = max_waiting
        self._clock = clock
        self._waiting: set[str] = set()
        self._last_start_s: float | None = None  # None: nobody waited then
        self._interval_s = 0.0  # between two starts while somebody waits, smoothed

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def expected_wait_s(self) -> float:
        return len(self._waiting) * self._interval_s

    def admit(self, request: Request) -> None:
        """Counts the request as waiting, or refuses it."""
        if request.deadline_s is not None:
            self._check_deadline(request.deadline_s - self._clock())
        if len(self._waiting) >= self._max_waiting:
            raise OverloadedError(
                f"{len(self._waiting)} requests are waiting, which is the limit. Try again later",
                self._retry_after_s(),
            )
        self._waiting.add(request.request_id)

    def observe(self, batch: Batch) -> None:
        """Takes note of who has left the queue."""
        for event in batch.events:
            if isinstance(event, StartEvent):
                self._waiting.discard(event.request_id)
                self._note_start()
            elif isinstance(event, FailEvent):
                self._waiting.discard(event.request_id)

    def _check_deadline(self, left_s: float) -> None:
        if left_s <= 0:
            raise DeadlineError("the deadline has passed already")
        if left_s < self.expected_wait_s:
            raise OverloadedError(
                f"the deadline is in {left_s:.1f} s and the queue is about "
                f"{self.expected_wait_s:.1f} s long. Try again later, or allow more time",
                self._retry_after_s(),
            )

    def _retry_after_s(self) -> float:
        """Until about half of the queue is gone; never so soon that refusals become a load."""
        return min(max(self.expected_wait_s / 2, 0.1), 30.0)

    def _note_start(self) -> None:
        now_s = self._clock()
        if self._last_start_s is not None:
            interval_s = now_s - self._last_start_s
            smoothed = self._interval_s + 0.2 * (interval_s - self._interval_s)
            self._interval_s = smoothed if self._interval_s else interval_s
        self._last_start_s = now_s if self._waiting else None
