"""Gives memory that isn't needed any more back to the system.

Knows: the collector, glibc's allocator, where libraries' code is. Does not know: what was freed.
"""

import ctypes
import gc
import re
from pathlib import Path

from quill.server.machine.huge_pages import advise

MADV_DONTNEED = 4  # from Linux's mman.h

_MAPS = Path("/proc/self/maps")
_CODE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r-xp \S+ \S+ [1-9]\d* +/")


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
    for start, stop in read_code(_MAPS.read_text(encoding="utf-8") if _MAPS.exists() else ""):
        advise(start, stop - start, MADV_DONTNEED)


def read_code(maps: str) -> list[tuple[int, int]]:
    """Where the code of libraries is mapped: of files, never written to, so nothing can be lost."""
    found = (_CODE.match(line) for line in maps.splitlines())
    return [(int(code[1], 16), int(code[2], 16)) for code in found if code]
