"""Patch of ONNX Runtime: copies the weights that it has mapped from a file into plain memory.

Knows: Linux's list of what this process has mapped. Does not know: graphs, bundles.

Why: ONNX Runtime maps weights instead of reading them, and computes from the mapping what it hasn't
packed into memory of its own, such as an embedding. A file that is truncated then ends the process
(SIGBUS), and a file that is overwritten changes answers silently: a private mapping shows what the
file becomes. ONNX Runtime has no public option for that; handing it the weights in memory copies
them once more: a peak of 1,212 MB instead of 677 for SmolLM2.
When it can go: when `test_engine_has_nothing_of_its_bundle_mapped` in
tests/server/machine/test_mapped_file.py passes without `detach`. Without Linux nothing is done.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

MAPS = Path("/proc/self/maps")
CHUNK_BYTES = 2**20  # how much is in memory twice, for a moment
MAP_FIXED = 0x10  # of Linux; the others are in `mmap`
FAILED = ctypes.c_void_p(-1).value


def detach(file: Path) -> int:
    """Puts copies in the place of a file's mappings; how many bytes. Nobody may use them then."""
    ranges = list(_mapped(file))
    for start, end in ranges:
        for at in range(start, end, CHUNK_BYTES):
            _replace(at, min(CHUNK_BYTES, end - at))
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


def _replace(address: int, length: int) -> None:
    content = ctypes.string_at(address, length)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
    placed = libc.mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if placed == FAILED:
        raise MemoryError(os.strerror(ctypes.get_errno()))
    ctypes.memmove(address, content, length)
