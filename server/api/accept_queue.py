"""Accepted calls that nothing was done for yet: last in, first out, and none waits for long.

Knows: deadlines, time. Does not know: gRPC, what a call is.

While calls come faster than they can be started, the first in line would have the least time left,
and all would miss their deadlines by as much as they waited. So the newest is started first
("adaptive LIFO"), and a call that has waited too long is rejected while its client still listens
(a queue timeout, as CoDel has one).
"""

import heapq
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

WAIT_SHARE = 0.75  # of a call's time until its deadline: then its client still gets the rejection
MAX_WAIT_S = 30.0
MAX_WAITING = 2**14  # each takes a few KB

_Call = TypeVar("_Call")


class AcceptQueue(Generic[_Call]):
    """Belongs to the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_put = 0
        self._waiting: dict[int, _Call] = {}  # the oldest first
        self._timeouts: list[tuple[float, int]] = []  # a heap; those started meanwhile, too

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, call: _Call, left_s: float | None) -> None:
        """`left_s`: until its deadline; None: it has none."""
        wait_s = MAX_WAIT_S if left_s is None else min(MAX_WAIT_S, WAIT_SHARE * left_s)
        self._num_put += 1
        self._waiting[self._num_put] = call
        heapq.heappush(self._timeouts, (self._clock() + wait_s, self._num_put))

    def take_newest(self) -> _Call:
        return self._waiting.popitem()[1]

    def take_late(self) -> Iterator[_Call]:
        """Those that have waited too long, and the oldest of too many."""
        timeouts, now_s = self._timeouts, self._clock()
        while timeouts and (timeouts[0][0] <= now_s or timeouts[0][1] not in self._waiting):
            call = self._waiting.pop(heapq.heappop(timeouts)[1], None)
            if call is not None:
                yield call
        while len(self._waiting) > MAX_WAITING:
            yield self._waiting.pop(next(iter(self._waiting)))
