"""Has constraints checked by the grammar worker before the engine gets them.

Knows: the worker's process, who waits for it, which constraints passed. Does not know: llguidance,
the engine, protobuf.

Owners take turns, and the worker checks one constraint at a time. The queue is bounded: as in the
engine's admission, no owner may have more constraints waiting than there are places left. Time in
the queue isn't time to compile. A constraint that passed is remembered by its key; one that was
rejected isn't. The worker starts with the first constraint, and again at once when it has died.
"""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from quill.server.errors import (
    InvalidFieldError,
    OverloadedError,
    RequestError,
    StepError,
    UnavailableError,
)
from quill.server.grammar.worker_messages import (
    MAX_COMPILE_BYTES,
    MAX_COMPILE_S,
    MAX_WALL_S,
    Verdict,
    receive_verdict,
    send,
)
from quill.server.request import Constraint

logger = logging.getLogger(__name__)

MAX_WAITING = 64
MAX_CHECKED = 4096  # keys
START_S = 60.0  # a busy machine needs long to start a process and to read a tokenizer
ANSWER_S = MAX_WALL_S + 10  # after which a worker hangs, and isn't only slow
_WORKER = "quill.server.grammar.worker"


class GrammarChecker:
    """For one tokenizer. Used by one event loop at a time, but for its own thread."""

    def __init__(self, tokenizer: Path, vocab_size: int, stop_ids: Sequence[int]) -> None:
        self._checked: OrderedDict[bytes, None] = OrderedDict()
        self._queue = _Queue()
        command = (sys.executable, "-m", _WORKER, str(tokenizer), str(vocab_size))
        self._worker = _Worker((*command, *map(str, stop_ids)))
        self._thread: threading.Thread | None = None
        # The thread knows the queue and the worker only: both end when the checker is forgotten.
        weakref.finalize(self, self._queue.close)

    @property
    def worker_pid(self) -> int | None:
        """None: it hasn't started, or it has died."""
        return self._worker.pid

    def has_passed(self, constraint: Constraint) -> bool:
        if constraint.key not in self._checked:
            return False
        self._checked.move_to_end(constraint.key)
        return True

    async def check(self, constraint: Constraint, owner: str) -> None:
        """Returns if the constraint compiles. Raises InvalidFieldError if it doesn't, and
        OverloadedError if too many are waiting."""
        if self._thread is None:
            arguments = (self._queue, self._worker)
            self._thread = threading.Thread(
                target=_serve, args=arguments, name="grammar checker", daemon=True
            )
            self._thread.start()
        await asyncio.wrap_future(self._queue.put(constraint, owner))
        self._checked[constraint.key] = None
        if len(self._checked) > MAX_CHECKED:
            self._checked.popitem(last=False)


class _Job:
    """A constraint, and all who wait for its verdict."""

    def __init__(self, constraint: Constraint, owner: str) -> None:
        self.constraint = constraint
        self.owner = owner
        self.waiting: list[Future[None]] = []

    def end(self, error: RequestError | None) -> None:
        for future in self.waiting:
            if future.set_running_or_notify_cancel():
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)


class _Queue:
    """Who waits for the worker. Owners take turns."""

    def __init__(self) -> None:
        self._jobs: dict[bytes, _Job] = {}  # all that wait, and the one that is being checked
        self._turns: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._changed = threading.Condition()
        self._is_closed = False
        self._check_s = 0.0  # what a check takes, smoothed

    def put(self, constraint: Constraint, owner: str) -> Future[None]:
        future: Future[None] = Future()
        with self._changed:
            job = self._jobs.get(constraint.key)
            if job is None:
                self._admit(owner)
                job = self._jobs[constraint.key] = _Job(constraint, owner)
                self._turns.setdefault(owner, deque()).append(job)
                self._changed.notify()
            job.waiting.append(future)
        return future

    def _admit(self, owner: str) -> None:
        num_waiting = sum(map(len, self._turns.values()))
        num_own, num_left = len(self._turns.get(owner, ())), MAX_WAITING - num_waiting
        if num_left <= 0 or (owner and num_own >= num_left):
            raise OverloadedError(
                f"{num_waiting} constraints are waiting to be compiled, {num_own} of them "
                "of this caller. Try again later",
                min(max(num_waiting * self._check_s / 2, 0.1), 30.0),
                "grammar_queue_full",
            )

    def take(self) -> _Job | None:
        """Waits for the next. None: the queue is closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._turns or self._is_closed)
                if self._is_closed:
                    return None
                owner, jobs = self._turns.popitem(last=False)
                job = jobs.popleft()
                if jobs:
                    self._turns[owner] = jobs  # as the last
                if any(not future.cancelled() for future in job.waiting):
                    return job
                del self._jobs[job.constraint.key]  # all who wanted it have left

    def end(self, job: _Job, error: RequestError | None, duration_s: float) -> None:
        with self._changed:
            del self._jobs[job.constraint.key]
            self._check_s += 0.2 * (duration_s - self._check_s)
        job.end(error)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def fail_all(self, error: RequestError) -> None:
        with self._changed:
            jobs, self._jobs = list(self._jobs.values()), {}
            self._turns.clear()
        for job in jobs:
            job.end(error)


class _Worker:
    """The worker's process, started when it is needed. Belongs to one thread."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def start(self) -> socket.socket:
        """Raises OSError or EOFError if it can't be started."""
        if self._connection is not None:
            return self._connection
        here, there = socket.socketpair()
        # One thread: numpy's library of linear algebra would start more, which nothing here needs.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with there:
            self._process = subprocess.Popen(
                self._command, stdin=there.fileno(), stdout=subprocess.DEVNULL, env=environment
            )
        here.settimeout(START_S)
        try:
            receive_verdict(here)
        except (OSError, EOFError):
            here.close()
            self.stop()
            raise
        here.settimeout(ANSWER_S)
        self._connection = here
        return here

    def ask(self, constraint: Constraint) -> Verdict:
        """A worker or a child of it that somebody killed is tried once more."""
        try:
            verdict = self._ask_once(constraint)
        except (OSError, EOFError):
            self.stop()
            return self._ask_once(constraint)
        return self._ask_once(constraint) if verdict.outcome == "killed" else verdict

    def _ask_once(self, constraint: Constraint) -> Verdict:
        connection = self.start()
        send(connection, constraint)
        return receive_verdict(connection)

    def stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._connection = None


def _serve(queue: _Queue, worker: _Worker) -> None:
    """The checker's thread."""
    while (job := queue.take()) is not None:
        began_s = time.monotonic()
        try:
            error = _error(job.constraint, worker.ask(job.constraint))
        except (OSError, EOFError) as problem:
            logger.error("the grammar worker doesn't work: %s", str(problem) or "it has died")
            error = UnavailableError("the grammar worker doesn't work. Try again later")
            worker.stop()
        except Exception:
            logger.exception("a bug in checking a constraint")
            error = StepError("a bug in the server; its log has more")
            worker.stop()
        queue.end(job, error, time.monotonic() - began_s)
        del job
        with contextlib.suppress(OSError, EOFError):
            worker.start()  # if it has died: the next constraint finds it ready
    worker.stop()
    queue.fail_all(UnavailableError("the server is stopping. Try another one, or later"))


def _error(constraint: Constraint, verdict: Verdict) -> RequestError | None:
    field, simpler = constraint.field, "Ask for something simpler"
    match verdict.outcome:
        case "accepted":
            return None
        case "rejected":
            return InvalidFieldError(verdict.field, verdict.reason)
        case "slow":
            return InvalidFieldError(
                field, f"takes longer than {MAX_COMPILE_S:g} s to compile. {simpler}"
            )
        case "large" | "killed":
            most = MAX_COMPILE_BYTES // 2**20
            return InvalidFieldError(field, f"takes more than {most} MB to compile. {simpler}")
    logger.error("a bug in compiling a grammar: %s", verdict.reason)
    return StepError("a bug in the server; its log has more")
