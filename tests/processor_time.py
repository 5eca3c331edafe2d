"""How much of the processor's time something takes: not how long, on a machine that others use."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def within_s(limit_s: float) -> Iterator[None]:
    """Of this thread alone, and without the garbage collector: the tests before decide how much
    that has to look at."""
    gc.disable()
    try:
        started_s = time.thread_time()
        yield
        assert time.thread_time() - started_s < limit_s
    finally:
        gc.enable()
