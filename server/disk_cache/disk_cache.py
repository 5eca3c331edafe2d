"""Blocks go to the disk behind the engine's steps, and come from there ahead of them.

Knows: threads, which blocks are on the disk, the pool's memory. Does not know: sequences, tokens.

The engine's thread calls, and waits for no disk. One thread writes and one reads, each through a
buffer for one block. A block is copied from the pool's memory without holding it there: if it was
evicted meanwhile the copy is dropped. So a slow disk holds nothing up, and a block that the engine
evicts before its turn isn't written.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from quill.server.disk_cache.block_folder import BlockFolder, Content, DamagedError
from quill.server.engine.block_pool import CachedBlock, LoadedBlock, PrefixHash
from quill.server.outputs import DiskCacheStats

logger = logging.getLogger(__name__)

MAX_QUEUED = 4096  # writes: they hold no memory
MAX_LOADING_BYTES = 32 * 2**20  # so much is read in the time of a step, or less
USED_AGAIN_S = 60.0  # how often a block that is used again and again is marked as used
PAUSE_S = 60.0  # after a failed write
STALL_S = 1.0  # without a block from a disk that is asked for one: computing is faster
WAIT_S = 0.01
WAKE = 16  # blocks, after which an engine that waits goes on
CLOSE_S = 5.0


class BlockMemory(Protocol):
    """The pool's blocks, whatever is in them."""

    @property
    def block_bytes(self) -> int: ...
    def read_block(self, block: int, content: Content) -> None: ...
    def write_block(self, block: int, content: Content) -> None: ...


class FolderDiskCache:
    """The `DiskCache` of server/engine/block_pool.py. Only its two threads touch files."""

    def __init__(
        self,
        folder: BlockFolder,
        memory: BlockMemory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert folder.block_bytes == memory.block_bytes
        self._folder = folder
        self._memory = memory
        self._clock = clock
        # On the disk, and when a block was last marked as used. Single entries are set and removed
        # by all threads.
        self._used_s: dict[PrefixHash, float] = dict.fromkeys(folder.keys, -USED_AGAIN_S)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[tuple[PrefixHash, int, int] | None] = queue.SimpleQueue()
        self._loaded: queue.SimpleQueue[LoadedBlock] = queue.SimpleQueue()
        self._num_loading = 0
        self._has_loaded = threading.Event()
        self._answered_s = 0.0  # when the disk brought a block, or was asked for the first
        self._resumes_s = 0.0  # nothing is written before
        # Counts, each of one thread: it writes, it reads, the engine's.
        self._num_written = self._num_unwritten = 0
        self._num_read = self._num_damaged = 0
        self._num_rejected = 0
        self._told = DiskCacheStats(0, 0, 0, 0, 0, 0, 0)
        self._content_to_write = np.empty(folder.block_bytes, np.uint8)
        self._writer = threading.Thread(target=self._write_all, name="disk write", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read_all, name="disk read", daemon=True).start()

    # The engine's thread.

    @property
    def max_loading(self) -> int:
        return max(1, MAX_LOADING_BYTES // self._folder.block_bytes)

    def __contains__(self, key: PrefixHash) -> bool:
        return key in self._used_s and not self._is_stalled

    @property
    def _is_stalled(self) -> bool:
        return self._num_loading > 0 and self._clock() - self._answered_s > STALL_S

    def keep(self, cached: CachedBlock, place: int) -> None:
        used_s, now_s = self._used_s.get(cached.key), self._clock()
        if used_s is not None and now_s - used_s < USED_AGAIN_S:
            return
        if self._jobs.qsize() >= MAX_QUEUED:
            self._num_rejected += 1
        elif used_s is None:
            self._jobs.put(partial(self._write, cached, place))
        else:
            self._used_s[cached.key] = now_s
            self._jobs.put(partial(self._touch, cached.key, place))

    def load(self, key: PrefixHash, block: int, place: int) -> None:
        if not self._num_loading:
            self._answered_s = self._clock()
        self._num_loading += 1
        self._loads.put((key, block, place))

    def loaded(self) -> list[LoadedBlock]:
        self._has_loaded.clear()
        found = [self._loaded.get() for _ in range(self._loaded.qsize())]
        self._num_loading -= len(found)
        return found

    def wait(self) -> None:
        self._has_loaded.wait(WAIT_S)

    def forget(self, keys: Sequence[PrefixHash]) -> None:
        for key in keys:
            self._used_s.pop(key, None)
            self._jobs.put(partial(self._remove, key))

    def take_stats(self) -> DiskCacheStats:
        size, told = self._folder.block_bytes, self._told
        self._told = now = DiskCacheStats(
            num_read=self._num_read,
            read_bytes=self._num_read * size,
            num_written=self._num_written,
            written_bytes=self._num_written * size,
            num_dropped=self._num_unwritten + self._num_rejected,
            num_damaged=self._num_damaged,
            used_bytes=self._folder.used_bytes,
        )
        since = [new - old for new, old in zip(now, told, strict=True)]
        return DiskCacheStats(*since)._replace(used_bytes=now.used_bytes)

    def close(self) -> None:
        self._loads.put(None)
        self._jobs.put(None)
        self._writer.join(CLOSE_S)

    # The thread that writes.

    def _write_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _write(self, cached: CachedBlock, place: int) -> None:
        if cached.key in self._used_s:
            return  # it was queued twice
        if self._clock() < self._resumes_s or not self._copy(cached):
            self._num_unwritten += 1
            return
        try:
            evicted = self._folder.write(cached.key, self._content_to_write, place)
        except OSError as error:
            self._num_unwritten += 1
            self._resumes_s = self._clock() + PAUSE_S
            logger.warning(
                "can't write to --prefix-cache-dir: %s. The server goes on without, and tries "
                "again in %g s",
                error.strerror,
                PAUSE_S,
            )
            return
        for key in evicted:
            self._used_s.pop(key, None)
        self._used_s[cached.key] = self._clock()
        self._num_written += 1

    def _copy(self, cached: CachedBlock) -> bool:
        """Whether it was cached all the time: else there may be anything in the copy."""
        if cached.is_valid:
            self._memory.read_block(cached.block, self._content_to_write)
        return cached.is_valid

    def _touch(self, key: PrefixHash, place: int) -> None:
        try:
            self._folder.touch(key, place)
        except OSError:
            self._used_s.pop(key, None)  # it is written when it is used again

    def _remove(self, key: PrefixHash) -> None:
        """After the writes that were queued before."""
        self._used_s.pop(key, None)
        self._folder.remove(key)

    # The thread that reads.

    def _read_all(self) -> None:
        content = np.empty(self._folder.block_bytes, np.uint8)
        while (load := self._loads.get()) is not None:
            key, block, place = load
            is_good = self._read(key, place, content)
            if is_good:
                self._memory.write_block(block, content)
            self._answered_s = self._clock()
            self._loaded.put(LoadedBlock(key, block, is_good))
            if self._loads.qsize() % WAKE == 0:
                self._has_loaded.set()

    def _read(self, key: PrefixHash, place: int, content: Content) -> bool:
        try:
            self._folder.read(key, content, place)
        except DamagedError:
            self._num_damaged += 1
            self._used_s.pop(key, None)
            self._jobs.put(partial(self._remove, key))
        except OSError:  # another process has removed it, or the disk can't be read
            self._used_s.pop(key, None)
        else:
            self._used_s[key] = self._clock()
            self._num_read += 1
            return True
        return False
