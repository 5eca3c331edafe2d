"""The weights are in huge pages and in no file, the KV cache is in small pages."""

import ctypes
import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from quill.server.loading.engine_factory import open_bundle, open_engine
from quill.server.machine import memory
from quill.server.machine.memory import (
    CHUNK_BYTES,
    PAGE_BYTES,
    Region,
    detach,
    read_code,
    read_regions,
)
from quill.server.request import Limits
from tests.server.tiny_bundle import TinyBundle

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
import contextlib, ctypes, mmap
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
own = gathered()
with mmap.mmap(-1, 24 * 2**20) as plain:  # whether the machine has free large pages at all
    plain.write(bytes(24 * 2**20))
    with contextlib.suppress(OSError):
        plain.madvise(25)  # MADV_COLLAPSE
    print(own - before, gathered() - own)
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
    wanted = 16 * 1024  # kB, of 24 MB
    found, possible = map(int, done.stdout.split())
    if max(found, possible) < wanted:
        pytest.skip("the memory of this machine is in pieces: there are no large pages now")
    assert found >= wanted


# 512 blocks of 4 KiB for each of 60 sides of layers, of which the first is written.
FIRST_TOKEN = """
from quill.server.engine.kv_cache import KVCache, BlockShape

def resident_kb():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))

blocks = KVCache(512, BlockShape("float32", ((1, 64, 16), (1, 16, 64)) * 30))
before = resident_kb()
for side in blocks._caches.values():
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


LENGTH = 2 * CHUNK_BYTES + 5000


def write(path: Path) -> bytes:
    path.write_bytes(os.urandom(LENGTH))
    return path.read_bytes()


def private_mapping(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def is_mapped(path: Path) -> bool:
    return str(path) in memory.MAPS.read_text()


def test_mapping_keeps_what_it_had_when_the_file_is_written_over(tmp_path: Path) -> None:
    path, other = tmp_path / "a file", tmp_path / "another"
    content = write(path)
    write(other)
    with private_mapping(path) as mapping, private_mapping(other):
        assert is_mapped(path)
        assert LENGTH <= detach(path) < LENGTH + mmap.PAGESIZE
        assert not is_mapped(path)
        assert is_mapped(other)
        path.write_bytes(b"")
        assert mapping[:] == content
        assert detach(path) == 0


def test_link_to_the_file_will_do(tmp_path: Path) -> None:
    write(tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with private_mapping(tmp_path / "link"):
        assert detach(tmp_path / "link") >= LENGTH


def test_engine_has_nothing_of_its_bundle_mapped(tiny_bundle: TinyBundle) -> None:
    bundle = open_bundle(tiny_bundle.directory, "fp32")
    limits = Limits(max_num_seqs=1, context=64, num_blocks=4)
    engine = open_engine(bundle, limits, 1)
    assert not is_mapped(tiny_bundle.directory)
    assert engine.is_idle


def test_without_a_list_of_mappings_nothing_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "MAPS", tmp_path / "none")
    assert detach(tmp_path / "file") == 0
