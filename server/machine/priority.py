"""Lets a thread wait for others.

Knows: Linux, where every thread has a niceness of its own. Does not know: what it does.
"""

import contextlib
import os
import sys
import threading


def be_nice(by: int) -> None:
    """This thread, from now on, to all others of this process. Elsewhere than on Linux it would be
    the whole process, so there it isn't."""
    if sys.platform != "linux":
        return
    own = threading.get_native_id()
    with contextlib.suppress(OSError):  # a sandbox may forbid it, and then it is merely slower
        os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + by)
