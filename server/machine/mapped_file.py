"""Takes a loaded model off its file, so that nothing that happens to the file can reach it.

Knows: Linux's list of what this process has mapped. Does not know: graphs, bundles.

ONNX Runtime maps weights instead of reading them, and computes from the mapping what it hasn't
packed into memory of its own, such as an embedding. A file that is cut short under it would end
the process (SIGBUS), and one that is written over would change answers in silence: a private
mapping shows what the file becomes, until it is written to. Handing the runtime the weights in
memory would do, too, but it copies them once more: 1,212 MB at most instead of 677 for SmolLM2.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

MAPS = Path("/proc/self/maps")
PIECE_BYTES = 2**20  # how much is in memory twice, for a moment
MAP_FIXED = 0x10  # of Linux; the others are in `mmap`
FAILED = ctypes.c_void_p(-1).value


def detach(file: Path) -> int:
    """Puts copies in the place of what is mapped of a file; how many bytes.

    Nobody may use them meanwhile. Elsewhere than on Linux nothing is known, and nothing done.
    """
    ranges = list(_mapped(file))
    for start, end in ranges:
        for at in range(start, end, PIECE_BYTES):
            _replace(at, min(PIECE_BYTES, end - at))
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
