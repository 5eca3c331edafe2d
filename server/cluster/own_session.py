"""Moves a program into a session of its own; output and signals stay with the terminal.

Knows: processes, signals. Does not know: who needs it.

Ctrl-C goes to every process of a terminal's group: HAProxy would end at once, and with it the calls
that should finish first.
"""

import contextlib
import ctypes
import os
import signal
import sys

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


def go_on_in_own_session() -> None:
    """Returns in a child with a session of its own. This process forwards signals to the child, and
    exits with the child's code. Call it before there are threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    # A signal that comes before the fork is forwarded afterwards.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    child = os.fork()
    if child == 0:
        os.setsid()
        _end_with(parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        return

    def forward(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # the child has just ended
            os.kill(child, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    sys.exit(code if code >= 0 else 128 - code)


def _end_with(parent: int) -> None:
    """Linux sends SIGTERM to this process when `parent` ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
