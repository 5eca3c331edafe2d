"""Which requests may wait for the engine: the queue's length, owners' shares of it, deadlines.

Knows: how many requests wait, whose they are, time. Does not know: requests' contents, processes.

Admission is decided before the engine gets a request, so that a rejection needn't wait for the step
that runs. Where callers have names, none may have more requests waiting than there are places left.
So an owner that floods gets half of the queue, two get a third each, and a new one finds a place.
"""

import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from quill.server.errors import DeadlineError, OverloadedError, RejectionReason

MIN_RETRY_S, MAX_RETRY_S = 0.1, 30.0
# How many rejected clients a second are asked back, at least: twice as many as can start. A
# rejection took 0.13 ms of the event loop's time.
RETRIES_PER_S = 200.0
MAX_SPREAD_S = 2.0  # over which they are asked back, however many they are
# How long a place is kept for a call that isn't started yet, or whose request isn't checked yet:
# old calls that wait behind newer ones don't fill the queue.
MAX_RESERVED_S = 1.0
WEIGHT = 1 / 32  # of one start's interval: requests whose answers are equally long start in waves


class QueueAdmission:
    """How many requests wait, whose they are, how fast they start."""

    def __init__(self, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_waiting = max_waiting
        self._clock = clock
        self._waiting: dict[str, str] = {}  # the owner of each request, and of each place reserved
        self._reserved_s: dict[str, float] = {}  # when each place was reserved, the oldest first
        self._num_reserved = 0  # since the start
        self._arrived_first: dict[str, float] = {}  # when requests came to an empty queue
        self._last_start_s: float | None = None  # None: the queue was empty then
        self._interval_s = 0.0  # between two starts while somebody waits, smoothed
        self._spread_s = 0.0  # how much later than the first of them the last one comes back
        self._rejected_s = clock()  # when the last one was rejected

    @property
    def num_waiting(self) -> int:
        """Requests, without the places that are only reserved. Any thread may ask."""
        return len(self._waiting) - len(self._reserved_s)

    @property
    def num_reserved(self) -> int:
        """Places; with those that were reserved for too long, until the next call comes."""
        return len(self._reserved_s)

    def expected_wait_s(self, owner: str = "") -> float:
        """Owners take turns: nobody waits for another's whole backlog."""
        num_turns = (self._num_waiting_of(owner) + 1) * len({owner, *self._waiting.values()})
        return min(len(self._waiting), num_turns) * self._interval_s

    def reserve(self, owner: str) -> str:
        """A place for a request that isn't read yet: `admit` takes it, or `leave` gives it back.

        Rejects an owner for whom the queue has no place, whatever it would ask for.
        """
        self._check_room(owner)
        self._num_reserved += 1
        place = f"place {self._num_reserved}"
        self._waiting[place], self._reserved_s[place] = owner, self._clock()
        return place

    def _check_room(self, owner: str) -> None:
        oldest_s = self._clock() - MAX_RESERVED_S
        while self._reserved_s and next(iter(self._reserved_s.values())) < oldest_s:
            self._free(next(iter(self._reserved_s)))
        num_left = self._max_waiting - len(self._waiting)
        if num_left <= 0:
            reason = f"{len(self._waiting)} requests are waiting, which is the limit"
            self._reject(reason, owner, "queue_full")
        if owner and (num_own := self._num_waiting_of(owner)) >= num_left:
            reason = f"{owner} has {num_own} requests waiting; the rest is for others"
            self._reject(reason, owner, "key_queue_share")

    def admit(
        self, request_id: str, owner: str, deadline_s: float | None, place: str | None = None
    ) -> None:
        """Counts the request as waiting, or rejects it. `place`: that was reserved for it."""
        has_place = place is not None and self._free(place)
        if deadline_s is not None:
            self._check_deadline(deadline_s - self._clock(), owner)
        if not has_place:
            self._check_room(owner)
        if not self.num_waiting:
            self._arrived_first[request_id] = self._clock()
        self._waiting[request_id] = owner

    def leave(self, started: Sequence[str], failed: Sequence[str]) -> None:
        """These requests wait no more, or need no place. Unknown ones are ignored."""
        if started:
            self._note_starts(started)
        for request_id in failed:
            self._free(request_id)
            self._arrived_first.pop(request_id, None)

    def _free(self, place: str) -> bool:
        """Whether it was taken or reserved."""
        self._reserved_s.pop(place, None)
        return self._waiting.pop(place, None) is not None

    def _num_waiting_of(self, owner: str) -> int:
        return sum(each == owner for each in self._waiting.values())

    def _check_deadline(self, left_s: float, owner: str) -> None:
        if left_s <= 0:
            raise DeadlineError("the deadline has passed already", "deadline_passed")
        wait_s = self.expected_wait_s(owner)
        if left_s < wait_s:
            raise OverloadedError(
                f"the deadline is in {left_s:.1f} s and the queue is about {wait_s:.1f} s long. "
                "Try again later, or allow more time",
                self._retry_after_s(owner),
                "deadline_too_short",
            )

    def _reject(self, reason: str, owner: str, rejection: RejectionReason) -> NoReturn:
        wait_s = self._retry_after_s(owner)
        raise OverloadedError(f"{reason}. Try again later", wait_s, rejection)

    def _retry_after_s(self, owner: str) -> float:
        """Until about half of the queue is gone.

        Clients that are rejected together come back one by one, so that rejections become no load.
        """
        now_s = self._clock()
        step_s = min(self._interval_s / 2 or 1.0, 1 / RETRIES_PER_S)
        spread_s = max(0.0, self._spread_s - (now_s - self._rejected_s)) + step_s
        self._spread_s, self._rejected_s = spread_s % MAX_SPREAD_S, now_s
        wait_s = min(max(self.expected_wait_s(owner) / 2, MIN_RETRY_S), MAX_RETRY_S)
        return wait_s + self._spread_s

    def _note_starts(self, started: Sequence[str]) -> None:
        """Of one step: they share the time since the last start.

        A request that arrived at an empty queue waited for no other, so no start takes longer than
        that now: whatever delayed the queue before, a pause of the whole machine perhaps, is over.
        """
        now_s = self._clock()
        if self._last_start_s is not None:
            interval_s = (now_s - self._last_start_s) / len(started)
            old = (1 - WEIGHT) ** len(started) if self._interval_s else 0.0
            self._interval_s = old * self._interval_s + (1 - old) * interval_s
        for request_id in started:
            self._waiting.pop(request_id, None)
            arrived_s = self._arrived_first.pop(request_id, None)
            if arrived_s is not None:
                self._interval_s = min(self._interval_s, now_s - arrived_s)
        self._last_start_s = now_s if self.num_waiting else None
