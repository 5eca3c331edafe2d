"""Puts the weights into large pages, where Linux has them, and the slots into small ones.

Knows: glibc's allocator, /proc, madvise. Does not know: what the memory holds.

A decode step reads every weight once, and with pages of 4 KiB the processor often waits to learn
where the next one is. The runtime allocates each matrix by itself, below the size that the system
gives large pages to unasked. So while a graph is loaded such allocations are made side by side,
and afterwards the kernel is asked to move them. Nothing but time depends on it: elsewhere, or if
the kernel refuses, all stays as it was.

Slots are the opposite: mostly empty, and numpy asks for large pages under every large array. Each
head of each layer then takes 2 MiB with its first token: 360 MB for the first request in a slot of
8,192 tokens of SmolLM2, and half a second to clear them while everybody waited.
"""

import ctypes
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt

PAGE_BYTES = 2 * 2**20
MIN_RESIDENT = 0.9  # a region that is used less than this would grow

# From glibc's malloc.h, and the limits that the allocator reaches by itself in the long run.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MMAP_BYTES = 32 * 2**20
# From Linux's mman.h, since 6.1. Older kernels refuse.
MADV_COLLAPSE = 25
MADV_NOHUGEPAGE = 15
SMALL_PAGE_BYTES = 4096

_MAPS = Path("/proc/self/smaps")
_REGION = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(?:\[heap\])?$")


class Region(NamedTuple):
    """Private memory without a file."""

    start: int
    stop: int
    resident: int  # bytes

    @property
    def pages(self) -> range:
        """The addresses of the whole large pages in it."""
        first = -(-self.start // PAGE_BYTES) * PAGE_BYTES
        return range(first, self.stop - PAGE_BYTES + 1, PAGE_BYTES)


@contextmanager
def huge_pages() -> Iterator[None]:
    """What is allocated inside and kept is in large pages afterwards."""
    libc = ctypes.CDLL(None) if _MAPS.exists() else None
    if libc is None or not hasattr(libc, "mallopt"):
        yield
        return
    libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
    libc.mallopt(M_TRIM_THRESHOLD, 2 * MMAP_BYTES)
    yield
    libc.malloc_trim(0)
    for region in read_regions(_MAPS.read_text(encoding="utf-8")):
        pages = region.pages
        if pages and region.resident >= MIN_RESIDENT * (region.stop - region.start):
            advise(pages.start, len(pages) * PAGE_BYTES, MADV_COLLAPSE)


def small_pages(array: npt.NDArray[Any]) -> None:
    """For an array that nobody has written to yet: only what is written to takes memory."""
    start = -(-array.ctypes.data // SMALL_PAGE_BYTES) * SMALL_PAGE_BYTES
    stop = array.ctypes.data + array.nbytes
    if sys.platform == "linux" and stop > start:
        advise(start, stop - start, MADV_NOHUGEPAGE)


def advise(start: int, num_bytes: int, advice: int) -> None:
    """Advice that isn't taken changes nothing but time and memory."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.madvise(start, num_bytes, advice)


def read_regions(smaps: str) -> list[Region]:
    """The private regions of a process, of those that can be written to."""
    found: list[Region] = []
    bounds = None
    for line in smaps.splitlines():
        if not line[0].isupper():
            region = _REGION.match(line)
            bounds = (int(region[1], 16), int(region[2], 16)) if region else None
        elif bounds is not None and line.startswith("Rss:"):
            found.append(Region(*bounds, int(line.split()[1]) * 1024))
    return found
