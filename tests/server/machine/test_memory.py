"""Huge pages where they pay, small ones for the KV cache, and pages given back."""

import ctypes
import platform
import subprocess
import sys

import pytest

from quill.server.machine.memory import PAGE_BYTES, Region, read_code, read_regions

SMAPS = """\
00400000-00500000 r-xp 00000000 fe:00 123 /usr/bin/python3
Size:               1024 kB
Rss:                1024 kB
VmFlags: rd ex
01000000-01800000 rw-p 00000000 00:00 0                                  [heap]
Size:               8192 kB
Rss:                8000 kB
7f0000001000-7f0000900000 rw-p 00000000 00:00 0
Rss:                4 kB
7f0000900000-7f0000a00000 rw-p 00000000 fe:00 77 /some/file
Rss:                1024 kB
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
Rss:                  20 kB
"""

# In a process of its own: glibc's limits are for the whole process.
GATHER = """
import ctypes
from quill.server.machine.memory import huge_pages

def gathered():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("AnonHugePages"))

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
before = gathered()
with huge_pages():
    for _ in range(24):
        block = libc.malloc(2**20)
        ctypes.memset(block, 1, 2**20)
print(gathered() - before)
"""


def _can_collapse() -> bool:
    release = tuple(int(part) for part in platform.release().split(".")[:2])
    return sys.platform == "linux" and release >= (6, 1) and hasattr(ctypes.CDLL(None), "mallopt")


def test_only_private_memory_is_looked_at() -> None:
    heap, anonymous = read_regions(SMAPS)
    assert heap == Region(0x1000000, 0x1800000, 8000 * 1024)
    assert anonymous == Region(0x7F0000001000, 0x7F0000900000, 4096)


def test_only_whole_pages_are_moved() -> None:
    assert list(Region(0, PAGE_BYTES, 0).pages) == [0]
    assert list(Region(1, 2 * PAGE_BYTES, 0).pages) == [PAGE_BYTES]
    assert not Region(4096, PAGE_BYTES, 0).pages


@pytest.mark.skipif(not _can_collapse(), reason="needs Linux 6.1 and glibc")
def test_many_small_allocations_end_up_in_large_pages() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GATHER], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) >= 16 * 1024  # kB, of 24 MB


# 512 blocks of 4 KiB for each of 60 sides of layers, of which the first is written.
FIRST_TOKEN = """
from quill.server.engine.kv_cache import KVCache, BlockShape

def resident_kb():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))

blocks = KVCache(512, BlockShape(30, "float32", (1, 64, 16), (1, 16, 64)))
before = resident_kb()
for side in blocks._caches:
    for cache in side:
        cache[0] = 1.0
print(resident_kb() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_first_block_takes_no_more_than_a_small_page_for_each_side() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_TOKEN], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) < 4 * 1024  # kB; with large pages 120 MB


def test_only_code_of_files_is_given_back() -> None:
    """A library's tables were written to when it was loaded, though nobody may any more."""
    maps = """\
00400000-00500000 r-xp 00000000 fe:00 123 /usr/bin/python3
7f0000000000-7f0000001000 r--p 00000000 fe:00 124 /usr/lib/libc.so.6
7f0000001000-7f0000003000 r-xp 00001000 fe:00 124 /usr/lib/libc.so.6
7f0000003000-7f0000004000 rw-p 00003000 fe:00 124 /usr/lib/libc.so.6
7f0000010000-7f0000020000 rwxp 00000000 00:00 0
7f0000020000-7f0000030000 r-xp 00000000 00:00 0
7ffc00000000-7ffc00002000 r-xp 00000000 00:00 0                          [vdso]
"""
    assert read_code(maps) == [(0x400000, 0x500000), (0x7F0000001000, 0x7F0000003000)]


# In a process of its own, lest the other tests' code has to be read again.
GIVE_BACK = """
import numpy, onnxruntime
from quill.server.machine.memory import drop_startup_pages

def of_files():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssFile"))

before = of_files()
drop_startup_pages()
print(before - of_files(), numpy.dot(numpy.ones(8), numpy.ones(8)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is given back")
def test_code_that_only_starting_needed_is_given_back_and_comes_again() -> None:
    command = [sys.executable, "-c", GIVE_BACK]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert int(said[0]) > 4000  # KB
    assert said[1] == "8.0"
