"""Constraints that wait for a thread. Owners take turns, and each has one in work at a time.

Knows: owners, constraints' keys. Does not know: what is done with a constraint.

So an owner whose constraints take long holds up one thread, and others go on with the rest. Who
asks for a constraint that waits already, or is in work, gets the same result.
"""

import math
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from quill.server.errors import OverloadedError
from quill.server.request import Constraint

Result = TypeVar("Result")


class _Job(Generic[Result]):
    """A constraint, and all who wait for its result."""

    def __init__(self, constraint: Constraint, owner: str) -> None:
        self.constraint = constraint
        self.owner = owner
        self.waiting: list[Future[Result]] = []

    def end(self, outcome: Future[Result]) -> None:
        for future in self.waiting:
            if future.set_running_or_notify_cancel():
                if error := outcome.exception():
                    future.set_exception(error)
                else:
                    future.set_result(outcome.result())


class JobQueue(Generic[Result]):
    """Used by any thread. `work` is called by those of `threads`.

    At most `max_waiting` constraints wait: as in the engine's admission, no owner may have more
    waiting than there are places left.
    """

    def __init__(
        self,
        work: Callable[[Constraint], Result],
        threads: ThreadPoolExecutor,
        max_waiting: float = math.inf,
    ) -> None:
        self._work = work
        self._threads = threads
        self._max_waiting = max_waiting
        self._jobs: dict[bytes, _Job[Result]] = {}  # that wait or are in work
        self._turns: OrderedDict[str, deque[_Job[Result]]] = OrderedDict()  # that wait
        self._in_work: Counter[str] = Counter()  # by owner
        self._lock = threading.Lock()
        self._duration_s = 0.0  # of one, smoothed

    def put(self, constraint: Constraint, owner: str) -> Future[Result]:
        future: Future[Result] = Future()
        with self._lock:
            job = self._jobs.get(constraint.key)
            if job is None:
                self._admit(owner)
                job = self._jobs[constraint.key] = _Job(constraint, owner)
                self._turns.setdefault(owner, deque()).append(job)
                self._threads.submit(self._run_next)
            job.waiting.append(future)
        return future

    def _admit(self, owner: str) -> None:
        num_waiting = sum(map(len, self._turns.values()))
        num_own, num_left = len(self._turns.get(owner, ())), self._max_waiting - num_waiting
        if num_left <= 0 or (owner and num_own >= num_left):
            raise OverloadedError(
                f"{num_waiting} constraints are waiting to be compiled, {num_own} of them "
                "of this caller. Try again later",
                min(max(num_waiting * self._duration_s / 2, 0.1), 30.0),
                "grammar_queue_full",
            )

    def _run_next(self) -> None:
        """Whenever a constraint may have become the next one, a thread comes here."""
        with self._lock:
            job = self._take()
        if job is None:
            return
        began_s, outcome = time.monotonic(), Future[Result]()
        try:
            outcome.set_result(self._work(job.constraint))
        except Exception as error:
            outcome.set_exception(error)
        with self._lock:
            del self._jobs[job.constraint.key]
            self._in_work[job.owner] -= 1
            self._duration_s += 0.2 * (time.monotonic() - began_s - self._duration_s)
            if self._turns:
                self._threads.submit(self._run_next)
        job.end(outcome)

    def _take(self) -> _Job[Result] | None:
        """The next constraint whose owner has none in work. Nobody is told apart from nobody."""
        for owner, jobs in list(self._turns.items()):
            if owner and self._in_work[owner]:
                continue
            del self._turns[owner]
            while jobs:
                job = jobs.popleft()
                if any(not future.cancelled() for future in job.waiting):
                    self._in_work[owner] += 1
                    if jobs:
                        self._turns[owner] = jobs  # as the last
                    return job
                del self._jobs[job.constraint.key]  # all who wanted it have left
        return None
