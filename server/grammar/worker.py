"""A process that finds out whether constraints compile, within limits that the kernel enforces.

Knows: forks, limits of processes, frames on a socket. Does not know: requests, who asks.

The process loads the tokenizer once. For each constraint it forks a child, which compiles the
constraint, computes its first mask, reports its verdict and ends. A child that takes too much
memory or time dies alone, and nothing that a constraint took stays. The process has one thread:
that makes its forks safe. It ends when its parent closes the socket or dies, and so do children.
"""

import contextlib
import ctypes
import math
import os
import resource
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

import msgspec

from quill.server.errors import InvalidFieldError
from quill.server.grammar.compiler import Compiler
from quill.server.grammar.worker_messages import (
    MAX_COMPILE_BYTES,
    MAX_COMPILE_S,
    MAX_WALL_S,
    VERDICTS,
    Verdict,
    receive_constraint,
    send,
)
from quill.server.machine.resources import lower_priority
from quill.server.request import Constraint

# Two busy threads on two cores double a step's time. A niceness of 5 leaves the model's threads
# most of it, and a large constraint is compiled within its second all the same.
NICENESS = 5
MAX_REASON = 600  # characters: a report fits into a pipe
_PR_SET_PDEATHSIG = 1


def main(tokenizer: str, vocab_size: str, *stop_ids: str) -> None:
    """Serves the socket that is its standard input, until that is closed."""
    lower_priority(NICENESS)
    connection = socket.socket(fileno=sys.stdin.fileno())
    text = Path(tokenizer).read_text("utf-8")
    compiler = Compiler(text, int(vocab_size), [int(each) for each in stop_ids])
    with contextlib.suppress(EOFError, ConnectionError):
        send(connection, Verdict("accepted"))  # it is ready
        while True:
            send(connection, _verdict(compiler, receive_constraint(connection), connection))


def _verdict(compiler: Compiler, constraint: Constraint, connection: socket.socket) -> Verdict:
    """A child's."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        _compile(compiler, constraint, write_end)
    os.close(write_end)
    try:
        report = _wait(read_end, connection)
    finally:
        os.close(read_end)
        os.kill(child, signal.SIGKILL)  # it has ended already, or it is too slow
        _, status = os.waitpid(child, 0)
    if report:
        return VERDICTS.decode(report)
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if report is None or number == signal.SIGXCPU:
        return Verdict("slow")
    return Verdict("killed" if number == signal.SIGKILL else "large")


def _wait(read_end: int, connection: socket.socket) -> bytes | None:
    """The child's report; empty if it died. None: its time is over. EOFError: nobody waits."""
    poll = select.poll()
    poll.register(read_end, select.POLLIN)
    poll.register(connection, 0)  # only whether it was closed
    end_s = time.monotonic() + MAX_WALL_S
    while (left_s := end_s - time.monotonic()) > 0:
        ready = [descriptor for descriptor, _ in poll.poll(math.ceil(1000 * left_s))]
        if read_end in ready:
            return os.read(read_end, select.PIPE_BUF)
        if ready:
            raise EOFError
    return None


def _compile(compiler: Compiler, constraint: Constraint, write_end: int) -> NoReturn:
    """The child's whole life."""
    verdict = Verdict("bug")
    try:
        _limit()
        compiler.compile_now(constraint)
        verdict = Verdict("accepted")
    except InvalidFieldError as error:
        verdict = Verdict("rejected", error.field, error.reason[:MAX_REASON])
    except MemoryError:
        verdict = Verdict("large")
    except BaseException as error:  # its message may quote the constraint
        verdict = Verdict("bug", reason=type(error).__name__)
    finally:
        os.write(write_end, msgspec.msgpack.encode(verdict))
        os._exit(0)


def _limit() -> None:
    """Of this process, a child: its memory, its processor time, its life after its parent's."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # Rust's last words
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_CPU, math.ceil(MAX_COMPILE_S), grace=1)  # SIGXCPU, then SIGKILL
    if sys.platform == "linux":
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        _set_limit(resource.RLIMIT_AS, num_pages * resource.getpagesize() + MAX_COMPILE_BYTES)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError):  # if memory runs out, this process dies first
            Path("/proc/self/oom_score_adj").write_text("1000")


def _set_limit(kind: int, most: int, grace: int = 0) -> None:
    _, hard = resource.getrlimit(kind)
    hard = most + grace if hard == resource.RLIM_INFINITY else min(most + grace, hard)
    resource.setrlimit(kind, (min(most, hard), hard))


if __name__ == "__main__":
    main(*sys.argv[1:])
