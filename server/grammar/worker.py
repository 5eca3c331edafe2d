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
from pathlib import Path
from typing import NoReturn

from quill.server.errors import InvalidFieldError
from quill.server.grammar.compiler import Compiler
from quill.server.grammar.worker_messages import (
    MAX_COMPILE_BYTES,
    MAX_COMPILE_S,
    MAX_WALL_S,
    Verdict,
    receive_constraint,
    send,
)
from quill.server.machine.resources import lower_priority

# Two busy threads on two cores double a step's time. A niceness of 5 leaves the model's threads
# most of it, and a large constraint is compiled within its second all the same.
NICENESS = 5
MAX_REASON = 600  # characters
_PR_SET_PDEATHSIG = 1


def main(tokenizer: str, vocab_size: str, *stop_ids: str) -> None:
    """Serves the socket that is its standard input, until that is closed."""
    lower_priority(NICENESS)
    control = socket.socket(fileno=sys.stdin.fileno())
    text = Path(tokenizer).read_text("utf-8")
    compiler = Compiler(text, int(vocab_size), [int(each) for each in stop_ids])
    with contextlib.suppress(ConnectionError):
        send(control, Verdict("accepted"))  # it is ready
        _serve(control, compiler)


def _serve(control: socket.socket, compiler: Compiler) -> None:
    """Each descriptor that comes is a connection that brings a constraint, to a child."""
    poll, children = select.poll(), dict[int, _Child]()
    poll.register(control, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != control.fileno():
                poll.unregister(descriptor)
                children.pop(descriptor).end()
                continue
            message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                return  # nobody needs this process any more
            child = _Child(compiler, socket.socket(fileno=descriptors[0]))
            children[child.descriptor] = child
            poll.register(child.descriptor, select.POLLIN)


class _Child:
    """A process that compiles one constraint. Its descriptor can be read once it has ended."""

    def __init__(self, compiler: Compiler, connection: socket.socket) -> None:
        self._connection = connection
        self._pid = os.fork()
        if not self._pid:
            _compile(compiler, connection)
        self.descriptor = os.pidfd_open(self._pid)

    def end(self) -> None:
        """One that was killed couldn't send its verdict."""
        _, status = os.waitpid(self._pid, 0)
        os.close(self.descriptor)
        with self._connection, contextlib.suppress(OSError):
            if os.WIFSIGNALED(status):
                send(self._connection, _verdict(os.WTERMSIG(status)))


def _verdict(number: int) -> Verdict:
    """By the signal that ended a child. Rust aborts where memory is refused."""
    if number in (signal.SIGXCPU, signal.SIGALRM):
        return Verdict("slow")
    return Verdict("killed" if number == signal.SIGKILL else "large")


def _compile(compiler: Compiler, connection: socket.socket) -> NoReturn:
    """The child's whole life."""
    verdict = Verdict("bug")
    try:
        _limit()
        compiler.compile_now(receive_constraint(connection))
        verdict = Verdict("accepted")
    except InvalidFieldError as error:
        verdict = Verdict("rejected", error.field, error.reason[:MAX_REASON])
    except MemoryError:
        verdict = Verdict("large")
    except BaseException as error:  # its message may quote the constraint
        verdict = Verdict("bug", reason=type(error).__name__)
    finally:
        with contextlib.suppress(OSError):
            send(connection, verdict)
        os._exit(0)


def _limit() -> None:
    """Of this process, a child: its memory, its processor time, its life after its parent's."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # Rust's last words
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_CPU, math.ceil(MAX_COMPILE_S), grace=1)  # SIGXCPU, then SIGKILL
    signal.setitimer(signal.ITIMER_REAL, MAX_WALL_S)  # SIGALRM
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
