"""Between the engine's thread and the disk: nobody waits, nothing half-written is kept."""

import errno
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quill.server.disk_cache.block_folder import BlockFolder, Content, DamagedError
from quill.server.disk_cache.disk_cache import MAX_QUEUED, PAUSE_S, STALL_S, FolderDiskCache
from quill.server.engine.block_pool import CachedBlock, LoadedBlock
from tests.server.scripted_session import TIMEOUT_S

BLOCK_BYTES = 64
NUM_BLOCKS = 8


class Memory:
    """Blocks full of one number each."""

    block_bytes = BLOCK_BYTES

    def __init__(self) -> None:
        self.blocks_NE = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        self.blocks_NE += np.arange(NUM_BLOCKS, dtype=np.uint8)[:, None]

    def read_block(self, block: int, content: Content) -> None:
        content[:] = self.blocks_NE[block]

    def write_block(self, block: int, content: Content) -> None:
        self.blocks_NE[block] = content


class Disk(BlockFolder):
    """Waits where a test holds it, and fails where a test says so."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, b"a" * 32, BLOCK_BYTES, 2**20)
        self.failure: Exception | None = None
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.waits = threading.Event()

    def write(self, *arguments: Any) -> set[bytes]:
        self._wait()
        return super().write(*arguments)

    def read(self, *arguments: Any) -> None:
        self._wait()
        super().read(*arguments)

    def _wait(self) -> None:
        self.waits.set()
        assert self.may_go_on.wait(TIMEOUT_S)
        if self.failure is not None:
            raise self.failure


class Cache:
    """A disk cache with a clock that only the test turns."""

    def __init__(self, path: Path) -> None:
        self.now_s = 1000.0
        self.memory, self.disk = Memory(), Disk(path)
        self.cache = FolderDiskCache(self.disk, self.memory, lambda: self.now_s)

    def keep(self, block: int) -> CachedBlock:
        cached = CachedBlock(key_of(block), block)
        self.cache.keep(cached, 0)
        return cached

    def hold(self) -> None:
        """The next read or write waits in the disk."""
        self.disk.may_go_on.clear()
        self.disk.waits.clear()

    def load(self, key: int, block: int) -> LoadedBlock:
        self.cache.load(key_of(key), block, 0)
        return self.loaded()

    def loaded(self) -> LoadedBlock:
        while not (found := self.cache.loaded()):
            self.cache.wait()
        (only,) = found
        return only

    def end(self) -> dict[str, int]:
        """What was counted, once all is written."""
        self.disk.may_go_on.set()
        self.cache.close()
        return {name: num for name, num in self.cache.take_stats()._asdict().items() if num}


def key_of(number: int) -> bytes:
    return bytes([number]) * 32


def keys_of(path: Path) -> set[int]:
    """What the next process finds."""
    return {key[0] for key in Disk(path).keys}


WRITTEN = {"num_written": 1, "written_bytes": BLOCK_BYTES, "used_bytes": 4096}


def test_what_is_kept_is_loaded_by_the_next_process(tmp_path: Path) -> None:
    first = Cache(tmp_path)
    first.keep(3)
    assert first.end() == WRITTEN
    second = Cache(tmp_path)
    assert key_of(3) in second.cache
    assert second.load(3, block=5) == LoadedBlock(key_of(3), 5, True)
    assert (second.memory.blocks_NE[5] == 3).all()
    assert second.end() == {"num_read": 1, "read_bytes": BLOCK_BYTES, "used_bytes": 4096}


def test_block_that_is_used_again_and_again_is_written_once(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.hold()
    for _ in range(3):
        cache.keep(3)
    assert cache.end() == WRITTEN


def test_engine_does_not_wait_for_a_disk_that_hangs(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.hold()
    for number in range(MAX_QUEUED + 10):
        cache.cache.keep(CachedBlock(number.to_bytes(32, "big"), 0), 0)
    assert cache.disk.waits.wait(TIMEOUT_S)
    assert cache.cache.take_stats().num_dropped in (9, 10), "one may have left the queue"
    cache.end()


def test_block_that_is_evicted_before_its_turn_is_not_written(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.hold()
    cache.keep(1)
    assert cache.disk.waits.wait(TIMEOUT_S)
    evicted = cache.keep(2)
    evicted.is_valid = False
    cache.memory.blocks_NE[2] = 99
    assert cache.end() == WRITTEN | {"num_dropped": 1}
    assert keys_of(tmp_path) == {1}


def test_block_that_is_evicted_while_it_is_copied_is_not_written(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cached = CachedBlock(key_of(1), 1)

    def read_block(block: int, content: Content) -> None:
        cached.is_valid = False

    cache.memory.read_block = read_block  # type: ignore[method-assign]
    cache.cache.keep(cached, 0)
    assert cache.end() == {"num_dropped": 1}
    assert keys_of(tmp_path) == set()


def test_forgotten_block_leaves_the_disk_even_if_it_is_just_being_written(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.hold()
    cache.keep(1)
    assert cache.disk.waits.wait(TIMEOUT_S)
    cache.cache.forget([key_of(1)])
    cache.end()
    assert key_of(1) not in cache.cache
    assert keys_of(tmp_path) == set()


def test_failed_write_is_warned_of_once_and_tried_again_after_a_pause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(tmp_path)
    with caplog.at_level(logging.WARNING):
        cache.disk.failure = OSError(errno.EROFS, "Read-only file system")
        cache.keep(1)
        cache.keep(2)
        flush(cache)
        cache.disk.failure = None
        cache.keep(3)
        flush(cache)
        cache.now_s += PAUSE_S
        cache.keep(4)
        assert cache.end() == WRITTEN | {"num_dropped": 3}
    (record,) = caplog.records
    assert record.getMessage() == (
        "can't write to --prefix-cache-dir: Read-only file system. The server goes on without, "
        "and tries again in 60 s"
    )
    assert keys_of(tmp_path) == {4}


def flush(cache: Cache) -> None:
    """All that was queued has been done."""
    done = threading.Event()
    cache.cache._jobs.put(done.set)
    assert done.wait(TIMEOUT_S)


@pytest.mark.parametrize(
    ("failure", "num_damaged"),
    [(DamagedError(), 1), (FileNotFoundError(), 0), (OSError(errno.EIO, "I/O error"), 0)],
)
def test_block_that_can_not_be_read_is_a_miss_from_then_on(
    tmp_path: Path, failure: Exception, num_damaged: int
) -> None:
    cache = Cache(tmp_path)
    cache.keep(3)
    flush(cache)
    cache.disk.failure = failure
    assert cache.load(3, block=5) == LoadedBlock(key_of(3), 5, False)
    assert (cache.memory.blocks_NE[5] == 5).all()
    assert key_of(3) not in cache.cache
    assert cache.cache.take_stats().num_damaged == num_damaged
    cache.disk.failure = None
    cache.keep(3)
    cache.end()
    assert keys_of(tmp_path) == {3}


def test_disk_that_does_not_answer_has_nothing_until_it_does(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    for block in (1, 2):
        cache.keep(block)
    flush(cache)
    cache.hold()
    cache.cache.load(key_of(1), 5, 0)
    assert key_of(2) in cache.cache
    cache.now_s += STALL_S + 0.1
    assert key_of(2) not in cache.cache
    assert cache.cache.loaded() == []
    cache.disk.may_go_on.set()
    assert cache.loaded().is_good
    assert key_of(2) in cache.cache


def test_block_in_use_is_marked_so_and_written_again_if_somebody_removed_it(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cached = cache.keep(3)
    flush(cache)
    (path,) = tmp_path.glob("prefix-blocks/*/0303*")
    used_ns = path.stat().st_mtime_ns
    cache.now_s += 3600
    cache.cache.keep(cached, 0)
    flush(cache)
    assert path.stat().st_mtime_ns > used_ns
    path.unlink()
    cache.now_s += 3600
    cache.cache.keep(cached, 0)
    flush(cache)
    assert key_of(3) not in cache.cache
    cache.cache.keep(cached, 0)
    cache.end()
    assert keys_of(tmp_path) == {3}
