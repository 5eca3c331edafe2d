"""A directory of KV blocks: a file for each, so many bytes at most, LRU eviction.

Knows: files, what a block's file looks like, other processes that use the directory.
Does not know: threads, the pool's blocks, models.

    DIRECTORY/prefix-blocks/          only its owner may enter
        total                         bytes of all files; its lock is held to change them
        IDENTITY/                     of a model and all else that a block's bits depend on
            HASH                      a block: its bytes, then IDENTITY, HASH and a checksum

A file is written under its own name: one that a killed process left is too short, and what a crash
of the machine left has a wrong checksum. Neither is read as a block. Two processes that write the
same block write the same bytes. So servers may share a directory, without waiting for each other
but to count. Files' times of change say when blocks were used. Blocks later in a text seem to be
older, since they are of no use without those before them.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import struct
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quill.server.errors import StartError

logger = logging.getLogger(__name__)

Content = npt.NDArray[np.uint8]  # of one block

_TRAILER = struct.Struct("<8s32s32sI")
_MAGIC = b"QUILLKV1"
_NAME = re.compile(r"[0-9a-f]{64}")
_TOTAL = struct.Struct("<Q")
_PAGE_BYTES = 4096  # files take whole ones
EVICTED = 0.05  # of the limit, at once: to look at all files takes a while
PLACE_NS = 10**8  # a block in the next place seems to be older by this


class DamagedError(Exception):
    """A file holds no whole block, or another one."""


class _File(NamedTuple):
    used_ns: int
    num_bytes: int  # on the disk
    size: int
    path: Path


class BlockFolder:
    """The blocks of one identity. All but reading is for one thread."""

    def __init__(self, directory: Path, identity: bytes, block_bytes: int, max_bytes: int) -> None:
        """StartError: the directory can't be used."""
        self.block_bytes = block_bytes
        self.used_bytes = 0  # of all identities
        self._identity = identity
        self._max_bytes = max_bytes
        self._path = directory / "prefix-blocks"
        self._own = self._path / identity.hex()
        self._size = block_bytes + _TRAILER.size
        if _on_disk(self._size) > max_bytes:
            raise StartError(
                f"--prefix-cache-dir-mb is too little for one block, which takes {self._size} bytes"
            )
        try:
            self.keys = self._open(directory)
        except OSError as error:
            raise StartError(
                f"--prefix-cache-dir {directory} can't be used: {error.strerror}. Give a directory "
                "that this user may write to, on a disk with free space"
            ) from error

    def _open(self, directory: Path) -> set[bytes]:
        """The blocks that are there."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (self._path, self._own):
            path.mkdir(mode=0o700, exist_ok=True)
            _check_private(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._total = os.open(self._path / "total", flags, 0o600)
        with self._locked():
            kept, _ = self._evict(self._max_bytes - _on_disk(self._size))
            self._set_total(_total(kept))
        keys = self._own_keys(file for file in kept if file.size == self._size)
        try:
            self._try_to_write()
        except OSError as error:
            if error.errno != errno.ENOSPC or not keys:
                raise
            logger.warning("there is no free space for --prefix-cache-dir: it is only read")
        return keys

    def _try_to_write(self) -> None:
        path = self._own / "trial"
        try:
            self._write_file(path, [bytes(self._size)])
        finally:
            path.unlink(missing_ok=True)

    def write(self, key: bytes, content: Content, place: int) -> set[bytes]:
        """Returns what was removed to make place for it. OSError: it isn't there."""
        path = self._own / key.hex()
        if _size_of(path) == self._size:  # another process has written it
            self.touch(key, place)
            return set()
        with self._locked():
            total, size, evicted = self._read_total(), _on_disk(self._size), set[bytes]()
            if total + size > self._max_bytes:
                kept, gone = self._evict(int(self._max_bytes * (1 - EVICTED)) - size)
                total, evicted = _total(kept), self._own_keys(gone)
            self._set_total(total + size)
        try:
            self._write_file(path, [content.data, self._trailer(key, content)])
            os.utime(path, ns=_used_ns(place))
        except OSError:
            with contextlib.suppress(OSError), self._locked():
                path.unlink(missing_ok=True)
                self._set_total(max(0, self._read_total() - size))
            raise
        return evicted

    def _write_file(self, path: Path, parts: list[Any]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(path, flags, 0o600)
        try:
            if os.writev(file, parts) != self._size:  # the disk is full in the middle
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(file)

    def touch(self, key: bytes, place: int) -> None:
        """It is used. FileNotFoundError: it is gone."""
        os.utime(self._own / key.hex(), ns=_used_ns(place))

    def remove(self, key: bytes) -> None:
        with contextlib.suppress(OSError), self._locked():
            path = self._own / key.hex()
            num_bytes = _on_disk(path.stat().st_size)
            path.unlink()
            self._set_total(max(0, self._read_total() - num_bytes))

    def read(self, key: bytes, content: Content, place: int) -> None:
        """Into `content`. By any thread. FileNotFoundError: another process has removed it;
        DamagedError."""
        file = os.open(self._own / key.hex(), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        trailer = bytearray(_TRAILER.size)
        try:
            is_whole = os.fstat(file).st_size == self._size
            if not is_whole or os.preadv(file, [content.data, trailer], 0) != self._size:
                raise DamagedError
            if trailer != self._trailer(key, content):
                raise DamagedError
            with contextlib.suppress(OSError):
                os.utime(file, ns=_used_ns(place))
        finally:
            os.close(file)

    def _trailer(self, key: bytes, content: Content) -> bytes:
        return _TRAILER.pack(_MAGIC, self._identity, key, zlib.crc32(content.data))

    # What all processes count together.

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._total, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._total, fcntl.LOCK_UN)

    def _read_total(self) -> int:
        content = os.pread(self._total, _TOTAL.size, 0)
        return int(_TOTAL.unpack(content)[0]) if len(content) == _TOTAL.size else self._max_bytes

    def _set_total(self, total: int) -> None:
        os.pwrite(self._total, _TOTAL.pack(total), 0)
        self.used_bytes = total

    def _evict(self, target: int) -> tuple[list[_File], list[_File]]:
        """Removes the least recently used until the rest have `target` bytes at most: these, and
        those that are gone."""
        files = sorted(file for folder in _named(self._path) for file in _files(Path(folder)))
        total, num_gone = _total(files), 0
        while num_gone < len(files) and total > target:
            with contextlib.suppress(FileNotFoundError):
                files[num_gone].path.unlink()
            total -= files[num_gone].num_bytes
            num_gone += 1
        return files[num_gone:], files[:num_gone]

    def _own_keys(self, files: Iterable[_File]) -> set[bytes]:
        return {bytes.fromhex(file.path.name) for file in files if file.path.parent == self._own}


def _size_of(path: Path) -> int | None:
    """None: it isn't there."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return None


def _files(folder: Path) -> Iterator[_File]:
    for entry in _named(folder):
        with contextlib.suppress(FileNotFoundError):
            found = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(found.st_mode):
                num_bytes = _on_disk(found.st_size)
                yield _File(found.st_mtime_ns, num_bytes, found.st_size, folder / entry.name)


def _named(folder: Path) -> Iterator["os.DirEntry[str]"]:
    """What has the name of an identity, or of a block."""
    with contextlib.suppress(NotADirectoryError), os.scandir(folder) as entries:
        yield from (entry for entry in entries if _NAME.fullmatch(entry.name))


def _total(files: Iterable[_File]) -> int:
    return sum(file.num_bytes for file in files)


def _on_disk(size: int) -> int:
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


def _used_ns(place: int) -> tuple[int, int]:
    now_ns = time.time_ns() - place * PLACE_NS
    return now_ns, now_ns


def _check_private(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise StartError(
            f"{path} must be a directory of this user that nobody else may enter: prompts can be "
            "inferred from what is in it. Remove it, or `chmod 700` it"
        )
