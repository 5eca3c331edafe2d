"""Takes a program away from its terminal, but for its output and its signals.

Knows: processes, signals. Does not know: who needs it.

Ctrl-C goes to every process of a terminal's group. HAProxy would end at once, and with it the
answers that should be finished first.
"""

import contextlib
import ctypes
import os
import signal
import sys

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


def go_on_in_own_session() -> None:
    """Returns in a child that has a session of its own. This process passes signals on to it, and
    ends when and as it does. Call it before there are threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    # Whatever comes before it is known whom to pass it on to is passed on afterwards.
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    child = os.fork()
    if child == 0:
        os.setsid()
        _end_with(parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        return

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(child, number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    sys.exit(code if code >= 0 else 128 - code)


def _end_with(parent: int) -> None:
    """In good order, even if somebody kills the other one."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
