"""Shows a person how long work is going: a live line on a terminal, plain lines elsewhere.

Knows: rich, terminals. Does not know: what is being done.
"""

import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

T = TypeVar("T")

PLAIN_INTERVAL_S = 10.0  # without a terminal, a line at most this often


class Display:
    """Progress through a known number of steps, with a few numbers beside it, on stderr."""

    def __init__(
        self,
        title: str,
        total: int,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self._title = title
        self._total = total
        self._clock = clock
        self._started = self._last_line = clock()
        self._first_step = 0
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
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

    def update(self, step: int, numbers: str) -> None:
        self._progress.update(self._task, completed=step, numbers=numbers)
        now = self._clock()
        due = now - self._last_line >= PLAIN_INTERVAL_S or step == self._total
        if not self._console.is_terminal and due:
            self._last_line = now
            left_s = (now - self._started) / (step - self._first_step) * (self._total - step)
            self._console.print(
                f"{self._title} {step}/{self._total}  {numbers}  {left_s:.0f} s left"
            )

    def say(self, text: str) -> None:
        """A line that stays, above the moving one."""
        self._console.print(text, markup=False)


def track(items: list[T], title: str = "scoring") -> Iterator[T]:
    """Goes through a list and shows how far it is."""
    with Display(title, len(items)) as display:
        for number, item in enumerate(items, start=1):
            yield item
            display.update(number, "")
