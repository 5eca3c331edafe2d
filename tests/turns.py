"""Whether other threads get their turns while a function runs."""

import sys
import threading
import time
from collections.abc import Callable

NEVER_S = 3600.0


def num_turns_of_others(work: Callable[[], object], interval_s: float) -> int:
    """How often another thread goes on meanwhile. It is offered a turn so often.

    With NEVER_S only who lets others go on by itself does so.
    """
    num_turns, stop = [0], threading.Event()

    def take_turns() -> None:
        while not stop.is_set():
            num_turns[0] += 1
            time.sleep(0)

    before_s = sys.getswitchinterval()
    other = threading.Thread(target=take_turns)
    other.start()
    sys.setswitchinterval(interval_s)
    try:
        first = num_turns[0]
        work()
        return num_turns[0] - first
    finally:
        sys.setswitchinterval(before_s)
        stop.set()
        other.join()
