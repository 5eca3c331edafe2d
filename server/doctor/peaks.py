"""Measures what this machine does at most: reads memory, and multiplies bytes.

Knows: the loops in export/operators/kernels/limits.h, threads, huge pages. Does not know: models.

A decode step of one sequence reads each weight once, so it can't be faster than memory; a prefill
can't be faster than the multipliers. The loops use the instructions that the kernels use here.
"""

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from quill.export.operators.library import library_path
from quill.server.machine.memory import PAGE_BYTES
from quill.server.machine.resources import available_bytes

READ_BYTES = 2**30  # far more than any cache holds
MIN_READ_BYTES = 2**26
MULTIPLY_S = 0.05

Work = Callable[[int], int]


class Rates(NamedTuple):
    """A second's. `products` 0: it isn't known."""

    bytes: float
    products: float


class Peaks:
    """Of this machine's memory and processor."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._library = _library()
        room = max(MIN_READ_BYTES, min(READ_BYTES, available_bytes() // 4))
        self._part = room // num_threads // PAGE_BYTES * PAGE_BYTES or PAGE_BYTES
        size = self._part * num_threads
        self._memory = mmap.mmap(-1, size + PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._start = -(-start // PAGE_BYTES) * PAGE_BYTES
        ctypes.memset(self._start, 1, size)
        self._products = int(self._library.QuillMultiplyBytes(1))  # of a round
        self._rounds = self._count_rounds()

    def measure(self) -> Rates:
        """Takes about a tenth of a second."""

        def read(part: int) -> int:
            self._library.QuillReadMemory(self._start + part * self._part, self._part)
            return self._part

        def multiply(_: int) -> int:
            self._library.QuillMultiplyBytes(self._rounds)
            return self._rounds * self._products

        return Rates(self._rate(read), self._rate(multiply))

    def _count_rounds(self) -> int:
        """Enough that starting threads takes no time beside it."""
        rounds = 1024
        while True:
            start = time.perf_counter()
            self._library.QuillMultiplyBytes(rounds)
            seconds = time.perf_counter() - start
            if seconds > MULTIPLY_S / 10:
                return int(rounds * MULTIPLY_S / seconds)
            rounds *= 2

    def _rate(self, work: Work) -> float:
        """What all threads do together in a second, from the first start to the last end."""
        barrier = threading.Barrier(self._num_threads)
        times: list[tuple[float, float]] = []
        done: list[int] = []

        def run(index: int) -> None:
            barrier.wait()
            start = time.perf_counter()
            done.append(work(index))
            times.append((start, time.perf_counter()))

        threads = [threading.Thread(target=run, args=(i,)) for i in range(self._num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = max(end for _, end in times) - min(start for start, _ in times)
        return sum(done) / seconds


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(os.fspath(library_path()))
    library.QuillReadMemory.restype = library.QuillMultiplyBytes.restype = ctypes.c_int64
    library.QuillReadMemory.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.QuillMultiplyBytes.argtypes = [ctypes.c_int64]
    return library
