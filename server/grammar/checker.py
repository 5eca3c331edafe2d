"""Has constraints checked by the grammar worker before the engine gets them.

Knows: the worker's process, which constraints passed. Does not know: llguidance, the engine,
protobuf.

A few constraints are checked at once, of an owner one. Time in the queue isn't time to compile. A
constraint that passed is remembered by its key; one that was rejected isn't. The worker starts with
the first constraint, and again when it has died.
"""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quill.server.errors import InvalidFieldError, RequestError, StepError, UnavailableError
from quill.server.grammar.job_queue import JobQueue
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
MAX_AT_ONCE = 3  # of different owners; each may take MAX_COMPILE_BYTES
MAX_CHECKED = 4096  # keys
MAX_RETRIES = 2
START_S = 60.0  # a busy machine needs long to start a process and to read a tokenizer
ANSWER_S = MAX_WALL_S + 10  # after which a worker hangs, and isn't only slow
_WORKER = "quill.server.grammar.worker"


class GrammarChecker:
    """For one tokenizer. Used by one event loop at a time."""

    def __init__(self, tokenizer: Path, vocab_size: int, stop_ids: Sequence[int]) -> None:
        self._checked: OrderedDict[bytes, None] = OrderedDict()
        command = (sys.executable, "-m", _WORKER, str(tokenizer), str(vocab_size))
        self._worker = _Worker((*command, *map(str, stop_ids)))
        threads = ThreadPoolExecutor(MAX_AT_ONCE, "grammar checker")
        self._queue: JobQueue[None] = JobQueue(self._worker.check, threads, MAX_WAITING)
        weakref.finalize(self, self._worker.stop)

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
        await asyncio.wrap_future(self._queue.put(constraint, owner))
        self._checked[constraint.key] = None
        if len(self._checked) > MAX_CHECKED:
            self._checked.popitem(last=False)


class _Worker:
    """The worker's process, started when it is needed. Used by several threads."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._lock = threading.RLock()

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def check(self, constraint: Constraint) -> None:
        try:
            error = _error(constraint, self._ask(constraint))
        except (OSError, EOFError) as problem:
            logger.error("the grammar worker doesn't work: %s", str(problem) or "it has died")
            error = UnavailableError("the grammar worker doesn't work. Try again later")
        except Exception:
            logger.exception("a bug in checking a constraint")
            error = StepError("a bug in the server; its log has more")
        if error is not None:
            raise error

    def _ask(self, constraint: Constraint) -> Verdict:
        """Again, where somebody killed the worker or its child."""
        for _ in range(MAX_RETRIES):
            with contextlib.suppress(OSError, EOFError):
                verdict = self._ask_once(constraint)
                if verdict.outcome != "killed":
                    return verdict
        return self._ask_once(constraint)

    def _ask_once(self, constraint: Constraint) -> Verdict:
        """Each constraint has a connection of its own, to the child that compiles it."""
        control, (here, there) = self._start(), socket.socketpair()
        with here:
            here.settimeout(ANSWER_S)
            try:
                with there:
                    socket.send_fds(control, [b"."], [there.fileno()])
                send(here, constraint)
                return receive_verdict(here)
            except (OSError, EOFError):
                self._restart(control)
                raise

    def _start(self) -> socket.socket:
        """Raises OSError or EOFError if it can't be started."""
        with self._lock:
            if self._control is not None:
                return self._control
            here, there = socket.socketpair()
            # One thread: numpy's library would start more, which nothing here needs.
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            with there:
                self._process = subprocess.Popen(
                    self._command, stdin=there.fileno(), stdout=subprocess.DEVNULL, env=environment
                )
            self._control = here
            here.settimeout(START_S)
            try:
                receive_verdict(here)
            except (OSError, EOFError):
                self.stop()
                raise
            watch = threading.Thread(target=self._watch, args=(self._process, here), daemon=True)
            watch.start()
            return here

    def _watch(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        process.wait()
        self._restart(control)

    def _restart(self, control: socket.socket) -> None:
        """At once, so no constraint waits for that; only by the first who notices."""
        with self._lock, contextlib.suppress(OSError, EOFError):
            if self._control is control:
                logger.error("the grammar worker has died, or hangs: it is started again")
                self.stop()
                self._start()

    def stop(self) -> None:
        with self._lock:
            if self._control is None:
                return
            self._control.close()
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            self._process = self._control = None


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
