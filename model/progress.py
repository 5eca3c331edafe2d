"""Shows a person how long work is going: a live line on a terminal, plain lines elsewhere.

Knows: rich, terminals. Does not know: what is being done.
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
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

T = TypeVar("T")

PLAIN_INTERVAL_S = 5.0  # without a terminal, a line at most this often


class Display:
    """Progress through a known number of steps or bytes, with a few numbers beside it, on stderr.

    A whole stage that may take 5 s belongs in one, or says a line when it begins.
    """

    def __init__(
        self,
        title: str,
        total: int,
        quiet: bool = False,
        in_bytes: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self._title = title
        self._total = total
        self._clock = clock
        self._started = self._last_line = clock()
        self._first_step = 0
        self._has_ended = False
        self._in_bytes = in_bytes
        self._progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False),  # it may be a path
            # On a narrow terminal the bar gives way first, then the last of the numbers.
            BarColumn(bar_width=None, table_column=Column(max_width=24)),
            DownloadColumn(table_column=_whole(len("100.0/100.0 MB")))
            if in_bytes
            else MofNCompleteColumn(table_column=_whole(2 * len(str(total)) + 1)),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("left"),
            TimeRemainingColumn(table_column=_whole(len("0:00:00"))),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(title, total=total, numbers="")

    def __enter__(self) -> "Display":
        self._progress.start()
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
        """Where a resumed run goes on."""
        self._first_step = step
        self._progress.update(self._task, completed=step)

    def update(self, step: int, numbers: str = "") -> None:
        self._progress.update(self._task, completed=step, numbers=numbers)
        ends = step == self._total and not self._has_ended and not self._console.is_terminal
        self._has_ended |= ends
        if ends or self._is_line_due(self._clock()):
            parts = (self._amount(step), numbers, self._left(step))
            self._print_line("  ".join(part for part in parts if part))

    def _amount(self, step: int) -> str:
        if self._in_bytes:
            return f"{self._title} {step / 1e6:.1f}/{self._total / 1e6:.1f} MB"
        return f"{self._title} {step}/{self._total}"

    def _left(self, step: int) -> str:
        if step <= self._first_step:
            return ""  # nothing to reckon with yet
        elapsed_s = self._clock() - self._started
        left_s = elapsed_s / (step - self._first_step) * (self._total - step)
        return f"{left_s:.0f} s left"

    def track(self, items: list[T], title: str) -> Iterator[T]:
        """Goes through a list that belongs to a step, and shows how far it is meanwhile."""
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
        self._console.print(line, markup=False)

    def say(self, text: str) -> None:
        """A line that stays, above the moving one."""
        self._console.print(text, markup=False)


def _whole(width: int) -> Column:
    return Column(no_wrap=True, min_width=width)


def track(items: Sequence[T], title: str = "scoring") -> Iterator[T]:
    """Goes through a list and shows how far it is."""
    with Display(title, len(items)) as display:
        for number, item in enumerate(items, start=1):
            yield item
            display.update(number)
