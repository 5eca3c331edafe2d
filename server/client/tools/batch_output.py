"""The output file of a batch, which is its only state, and its progress on stderr.

Knows: files, terminals, clocks. Does not know: what lines say, servers.

Every line begins with its number and a digest of the request: so a batch that is resumed sees
whether the file belongs to the same input. A line that was cut when its writer was killed is
truncated, and requested again.
"""

import fcntl
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO

from quill.server.errors import ServerError

_WIDTH = 24
_CLEAR = "\r\x1b[2K"
_REDRAW_S, _PLAIN_EVERY_S = 0.2, 10.0


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


class Progress:
    def __init__(
        self,
        num_all: int,
        num_before: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream or sys.stderr
        self._clock = clock
        self._on_terminal = self._stream.isatty()
        self._num_all, self._num_before, self.num_done = num_all, num_before, num_before
        self.num_failed = 0
        self._num_tokens = 0
        self._began_s = self._drawn_s = clock()

    def add(self, num_tokens: int, is_error: bool) -> None:
        """One more line is answered."""
        self.num_done += 1
        self.num_failed += is_error
        self._num_tokens += num_tokens
        every_s = _REDRAW_S if self._on_terminal else _PLAIN_EVERY_S
        if self._clock() - self._drawn_s >= every_s:
            self._draw()

    def print(self, text: str) -> None:
        """In place of the bar, which is drawn again below."""
        print(f"{_CLEAR if self._on_terminal else ''}{text}", file=self._stream, flush=True)

    def end(self) -> None:
        self._draw()
        if self._on_terminal:
            print(file=self._stream, flush=True)

    def _draw(self) -> None:
        self._drawn_s = self._clock()
        around = (_CLEAR, "") if self._on_terminal else ("", "\n")
        print(f"{around[0]}{self.text()}", end=around[1], file=self._stream, flush=True)

    def text(self) -> str:
        took_s = max(self._clock() - self._began_s, 1e-9)
        filled = _WIDTH * self.num_done // max(self._num_all, 1)
        parts = [
            f"[{'#' * filled}{'.' * (_WIDTH - filled)}] {self.num_done:,}/{self._num_all:,} lines",
            f"{self._num_tokens / took_s:,.0f} tokens/s",
        ]
        if self.num_failed:
            parts.append(f"{self.num_failed:,} failed")
        num_new, num_left = self.num_done - self._num_before, self._num_all - self.num_done
        if num_new and num_left:
            parts.append(f"{_duration(took_s * num_left / num_new)} left")
        elif not num_left:
            parts.append(f"took {_duration(took_s)}")
        return "  ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
