"""Decides at the door whether a request may join the queue.

Knows: how many wait, whose they are, how fast they start. Does not know: steps, slots, gRPC.

Where callers have names, nobody may have more requests waiting than there are places left. So one
who floods gets half of the queue, two get a third each, and a newcomer finds a place.

Belongs to the event loop's thread, so that a refusal needn't wait for the step under way. It
learns from the engine's batches who has started.
"""

import time
from collections.abc import Callable
from typing import NoReturn

from quill.server.errors import DeadlineError, OverloadedError
from quill.server.outputs import EngineOutputs, FailEvent, StartEvent
from quill.server.request import Request


class Admission:
    """A bounded queue, seen from outside."""

    def __init__(self, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_waiting = max_waiting
        self._clock = clock
        self._waiting: dict[str, str] = {}  # the owner of each request
        self._found_nobody: dict[str, float] = {}  # those that came to an empty queue, and when
        self._last_start_s: float | None = None  # None: nobody waited then
        self._interval_s = 0.0  # between two starts while somebody waits, smoothed

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def expected_wait_s(self, owner: str = "") -> float:
        """Owners take turns: nobody waits for another's whole backlog."""
        num_turns = (self._num_waiting_of(owner) + 1) * len({owner, *self._waiting.values()})
        return min(self.num_waiting, num_turns) * self._interval_s

    def admit(self, request: Request) -> None:
        """Counts the request as waiting, or refuses it."""
        owner = request.owner
        if request.deadline_s is not None:
            self._check_deadline(request.deadline_s - self._clock(), owner)
        num_left = self._max_waiting - self.num_waiting
        if num_left <= 0:
            self._refuse(f"{self.num_waiting} requests are waiting, which is the limit", owner)
        num_own = self._num_waiting_of(owner)
        if owner and num_own >= num_left:
            self._refuse(f"{owner} has {num_own} requests waiting; the rest is for others", owner)
        if not self._waiting:
            self._found_nobody[request.request_id] = self._clock()
        self._waiting[request.request_id] = owner

    def observe(self, batch: EngineOutputs) -> None:
        """Takes note of who has left the queue."""
        for event in batch.events:
            if isinstance(event, StartEvent | FailEvent):
                self._waiting.pop(event.request_id, None)
                came_s = self._found_nobody.pop(event.request_id, None)
                if isinstance(event, StartEvent):
                    self._note_start(came_s)

    def _num_waiting_of(self, owner: str) -> int:
        return sum(each == owner for each in self._waiting.values())

    def _check_deadline(self, left_s: float, owner: str) -> None:
        if left_s <= 0:
            raise DeadlineError("the deadline has passed already")
        wait_s = self.expected_wait_s(owner)
        if left_s < wait_s:
            raise OverloadedError(
                f"the deadline is in {left_s:.1f} s and the queue is about {wait_s:.1f} s long. "
                "Try again later, or allow more time",
                self._retry_after_s(owner),
            )

    def _refuse(self, reason: str, owner: str) -> NoReturn:
        raise OverloadedError(f"{reason}. Try again later", self._retry_after_s(owner))

    def _retry_after_s(self, owner: str) -> float:
        """Until about half of the queue is gone; never so soon that refusals become a load."""
        return min(max(self.expected_wait_s(owner) / 2, 0.1), 30.0)

    def _note_start(self, came_s: float | None) -> None:
        """`came_s`: when it came, if nobody waited then.

        Such a one waited for itself alone, so no start takes longer than that now: whatever held
        the queue up before, a pause of the whole machine perhaps, is over.
        """
        now_s = self._clock()
        if self._last_start_s is not None:
            interval_s = now_s - self._last_start_s
            smoothed = self._interval_s + 0.2 * (interval_s - self._interval_s)
            self._interval_s = smoothed if self._interval_s else interval_s
        if came_s is not None:
            self._interval_s = min(self._interval_s, now_s - came_s)
        self._last_start_s = now_s if self._waiting else None
