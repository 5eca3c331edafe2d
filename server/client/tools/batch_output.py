"""The output file of a batch: whole lines in the order of the input. It is the only state.

Knows: files. Does not know: what lines say, servers.

Every line begins with its number and a digest of the request: so a batch that is resumed sees
whether the file belongs to the same input. A line that was cut when its writer was killed is
truncated, and requested again.
"""

import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from quill.server.errors import ServerError


class OutputError(ServerError):
    """The output file can't be written, or isn't of this batch."""


class Output:
    """One writer at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise OutputError(f"can't write {path}: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(self._file).st_mode):  # a device or pipe may have no end
            os.close(self._file)
            raise OutputError(f"{path} must be a file: it is read when the batch resumes")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            raise OutputError(f"another process is writing {path}") from error

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def resume(self, heads: Iterable[bytes], mark: bytes) -> tuple[int, int]:
        """How many lines are there already, which must begin with these heads, and how many of
        them have the mark after the head."""
        try:
            num_lines, num_marked, end = self._count(iter(heads), mark)
            os.ftruncate(self._file, end)
            os.lseek(self._file, end, os.SEEK_SET)
        except OSError as error:
            raise OutputError(f"{self._path} must be a file: {error.strerror}") from error
        return num_lines, num_marked

    def _count(self, heads: Iterator[bytes], mark: bytes) -> tuple[int, int, int]:
        """Whole lines, those of them with the mark, and their bytes."""
        num_lines, num_marked, end = 0, 0, 0
        with self._path.open("rb") as file:
            for line in file:
                head = next(heads, None)
                is_whole = line.endswith(b"\n")
                if head is None or not (
                    line.startswith(head) or (not is_whole and head.startswith(line))
                ):
                    raise OutputError(
                        f"line {num_lines + 1} of {self._path} isn't the answer to its input line: "
                        "the input, --seed or the model was another. Give another file"
                    )
                if is_whole:
                    num_lines, end = num_lines + 1, end + len(line)
                    num_marked += line.startswith(mark, len(head))
        return num_lines, num_marked, end

    def append(self, lines: bytes) -> None:
        left = memoryview(lines)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            raise OutputError(f"can't write {self._path}: {error.strerror}") from error

    def sync(self) -> None:
        """What was written survives a crash of the machine."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise OutputError(f"can't write {self._path}: {error.strerror}") from error
