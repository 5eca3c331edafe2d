"""Memory pages: the weights in huge pages, the KV cache in small ones, free pages given back.

Knows: glibc's allocator, /proc, madvise. Does not know: what the memory holds.

A decode step reads every weight once, and with pages of 4 KiB the processor often waits for the
page table. ONNX Runtime allocates each matrix by itself, below the size that Linux gives huge pages
to by itself. So while a graph is loaded its allocations are made side by side, and afterwards the
kernel is asked to collapse them. Only time depends on it: without Linux, or if the kernel doesn't,
nothing changes.

The KV cache is the opposite: mostly empty, and numpy asks for huge pages under every large array.
Each head of each layer then takes 2 MiB with its first token: 360 MB for a first request of SmolLM2
with 8,192 tokens, and half a second to clear the pages while all others waited.

Weights that ONNX Runtime has mapped from a file are copied into plain memory (`detach`): ONNX
Runtime computes from the mapping what it hasn't packed, such as an embedding. A file that is
truncated then ends the process (SIGBUS), and one that is overwritten changes answers silently. ONNX
Runtime has no public option for that; handing it the weights in memory copies them once more: a
peak of 1,212 MB instead of 677 for SmolLM2. It can go when
`test_engine_has_nothing_of_its_bundle_mapped` passes without it.
"""

import ctypes
import gc
import mmap
import os
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
MADV_HUGEPAGE = 14
MADV_NOHUGEPAGE = 15
MADV_DONTNEED = 4
SMALL_PAGE_BYTES = 4096

_SMAPS = Path("/proc/self/smaps")
MAPS = Path("/proc/self/maps")
_CODE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r-xp \S+ \S+ [1-9]\d* +/")
_REGION = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(?:\[heap\])?$")


class Region(NamedTuple):
    """Private memory without a file."""

    start: int
    stop: int
    resident: int  # bytes

    @property
    def pages(self) -> range:
        """The addresses of the whole huge pages in it."""
        first = -(-self.start // PAGE_BYTES) * PAGE_BYTES
        return range(first, self.stop - PAGE_BYTES + 1, PAGE_BYTES)


@contextmanager
def huge_pages() -> Iterator[None]:
    """What is allocated inside and kept is in huge pages afterwards."""
    libc = ctypes.CDLL(None) if _SMAPS.exists() else None
    if libc is None or not hasattr(libc, "mallopt"):
        yield
        return
    libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
    libc.mallopt(M_TRIM_THRESHOLD, 2 * MMAP_BYTES)
    yield
    libc.malloc_trim(0)
    for region in read_regions(_SMAPS.read_text(encoding="utf-8")):
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


def trim_heap() -> None:
    """May take tens of milliseconds: not for the event loop.

    glibc keeps what was freed: after SmolLM2 in fp32 had been loaded beside itself three times,
    1.4 GB were held without this, and 1.0 GB with it.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # not glibc: nothing to be done
        trim(0)


def drop_startup_pages() -> None:
    """Gives back what only starting needed.

    That is memory which was freed and lies around (a tokenizer leaves 25 MB), and the libraries'
    code: of some 35 MB a server needs 10 again, and finds them where they were.
    """
    trim_heap()
    for start, stop in read_code(MAPS.read_text(encoding="utf-8") if MAPS.exists() else ""):
        advise(start, stop - start, MADV_DONTNEED)


def read_code(maps: str) -> list[tuple[int, int]]:
    """Where the code of libraries is mapped: of files, never written to, so nothing can be lost."""
    found = (_CODE.match(line) for line in maps.splitlines())
    return [(int(code[1], 16), int(code[2], 16)) for code in found if code]


CHUNK_BYTES = 16 * PAGE_BYTES  # how much is in memory twice, for a moment
MAP_FIXED = 0x10  # of Linux; the others are in `mmap`
FAILED = ctypes.c_void_p(-1).value


def detach(file: Path) -> int:
    """Puts copies in the place of a file's mappings; how many bytes. Nobody may use them then."""
    ranges = list(_mapped(file))
    copy = ctypes.create_string_buffer(CHUNK_BYTES)
    for start, end in ranges:
        for at in range(start, end, CHUNK_BYTES):
            _replace(at, min(CHUNK_BYTES, end - at), copy)
    return sum(end - start for start, end in ranges)


def _mapped(file: Path) -> Iterator[tuple[int, int]]:
    try:
        lines = MAPS.read_bytes().splitlines()
    except OSError:
        return
    name = os.fsencode(file.resolve())
    for line in lines:
        addresses, _, _, _, _, *path = line.split(maxsplit=5)
        if path == [name]:
            start, end = (int(address, 16) for address in addresses.split(b"-"))
            yield start, end


def _replace(address: int, length: int, copy: ctypes.Array[ctypes.c_char]) -> None:
    """Asks for huge pages before they are written to: small ones would be as many page faults."""
    ctypes.memmove(copy, address, length)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
    placed = libc.mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if placed == FAILED:
        raise MemoryError(os.strerror(ctypes.get_errno()))
    advise(address, length, MADV_HUGEPAGE)
    ctypes.memmove(address, copy, length)
