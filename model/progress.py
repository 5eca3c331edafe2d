"""Displays the progress of long work: a bar on a terminal, plain lines elsewhere, on stderr.

Knows: rich, terminals. Does not know: what the work is.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

T = TypeVar("T")

PLAIN_INTERVAL_S = 5.0  # without a terminal, a line at most this often


class Display:
    """Progress through a number of steps or bytes, with a few numbers beside it.

    Any stage that may take 5 s has a display, or prints a line when it begins. `total`: None if it
    is unknown. `transient`: the bar vanishes at the end, and without a terminal the title is
    printed at the beginning.
    """

    def __init__(
        self,
        title: str,
        total: int | None,
        quiet: bool = False,
        in_bytes: bool = False,
        transient: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self._title = title
        self._total = total
        self._transient = transient
        self._clock = clock
        self._started = self._last_line = clock()
        self._step = self._first_step = 0
        self._has_ended = False
        self._in_bytes = in_bytes
        self._progress = Progress(
            *_columns(total, in_bytes),
            console=self._console,
            transient=transient,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(title, total=total, numbers="")

    def __enter__(self) -> "Display":
        self._progress.start()
        if self._transient and not self._console.is_terminal:
            self.print(f"{self._title} …")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()
        sys.stderr.flush()

    def start_at(self, step: int) -> None:
        """Sets the step that a resumed run continues from."""
        self._step = self._first_step = step
        self._progress.update(self._task, completed=step)

    def advance(self) -> None:
        """One more step is done."""
        self.update(self._step + 1)

    def update(self, step: int, numbers: str = "") -> None:
        self._step = step
        self._progress.update(self._task, completed=step, numbers=numbers)
        ends = step == self._total and not self._has_ended and not self._console.is_terminal
        self._has_ended |= ends
        if (ends and not self._transient) or self._is_line_due(self._clock()):
            parts = (self._amount(step), numbers, self._left(step))
            self._print_line("  ".join(part for part in parts if part))

    def _amount(self, step: int) -> str:
        if self._total is None:
            return f"{self._title} {step}"
        if self._in_bytes:
            return f"{self._title} {step / 1e6:.1f}/{self._total / 1e6:.1f} MB"
        return f"{self._title} {step}/{self._total}"

    def _left(self, step: int) -> str:
        if step <= self._first_step or self._total is None:
            return ""  # no estimate yet
        elapsed_s = self._clock() - self._started
        left_s = elapsed_s / (step - self._first_step) * (self._total - step)
        return f"{left_s:.0f} s left"

    def track(self, items: list[T], title: str) -> Iterator[T]:
        """Iterates over a list within a step, with a bar for the list."""
        task = self._progress.add_task(title, total=len(items), numbers="")
        try:
            for number, item in enumerate(items, start=1):
                yield item
                self._progress.update(task, completed=number)
                if self._is_line_due(self._clock()):
                    self._print_line(f"{title} {number}/{len(items)}")
        finally:
            self._progress.remove_task(task)

    def _is_line_due(self, now: float) -> bool:
        return not self._console.is_terminal and now - self._last_line >= PLAIN_INTERVAL_S

    def _print_line(self, line: str) -> None:
        self._last_line = self._clock()
        self.print(line)

    def print(self, text: str) -> None:
        """Prints a line that stays, above the bar."""
        self._console.print(text, markup=False)


def _columns(total: int | None, in_bytes: bool) -> Iterator[ProgressColumn]:
    yield TextColumn("{task.description}", style="bold", markup=False)  # it may be a path
    # On a narrow terminal the bar shrinks first, then the last of the numbers.
    yield BarColumn(bar_width=None, table_column=Column(max_width=24))
    if total is None:
        yield TimeElapsedColumn()
        return
    if in_bytes:
        yield DownloadColumn(table_column=_fixed(len("100.0/100.0 MB")))
    else:
        yield MofNCompleteColumn(table_column=_fixed(2 * len(str(total)) + 1))
    yield TextColumn("{task.fields[numbers]}")
    yield TextColumn("left")
    yield TimeRemainingColumn(table_column=_fixed(len("0:00:00")))


def _fixed(width: int) -> Column:
    return Column(no_wrap=True, min_width=width)


def track(items: Sequence[T], title: str = "scoring") -> Iterator[T]:
    """Iterates over a list and displays the progress."""
    with Display(title, len(items)) as display:
        for number, item in enumerate(items, start=1):
            yield item
            display.update(number)
