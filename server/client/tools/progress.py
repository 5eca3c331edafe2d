"""The progress of a batch on stderr: a bar, or a line now and then where it isn't a terminal.

Knows: terminals, clocks. Does not know: lines, servers.
"""

import sys
import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 24
_CLEAR = "\r\x1b[2K"
_REDRAW_S, _PLAIN_EVERY_S = 0.2, 10.0


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
