"""Shows the stages of an export: a bar with the time left on a terminal, lines elsewhere.

Knows: rich, terminals. Does not know: what is being done.
"""

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from quill.export.verify.proof import Tick

PLAIN_INTERVAL_S = 10.0  # without a terminal, a line at most this often


class Stages:
    """Says which stage begins, shows how far it is, and leaves a line with its time behind."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextlib.contextmanager
    def __call__(self, title: str, total: int | None = None) -> Iterator[Tick]:
        start = time.monotonic()
        if self._console.is_terminal:
            with self._bar(title, total) as tick:
                yield tick
        else:
            self._console.print(f"{title} …")
            yield self._lines(title, total)
        self._console.print(f"{title}: {time.monotonic() - start:.0f} s")

    @contextlib.contextmanager
    def _bar(self, title: str, total: int | None) -> Iterator[Tick]:
        counted = (MofNCompleteColumn(), TimeRemainingColumn()) if total else (TimeElapsedColumn(),)
        columns = (TextColumn("{task.description}"), BarColumn(), *counted)
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task(title, total=total)
            yield lambda: progress.advance(task)

    def _lines(self, title: str, total: int | None) -> Tick:
        started = last = time.monotonic()
        num_done = 0

        def tick() -> None:
            nonlocal last, num_done
            num_done += 1
            now = time.monotonic()
            if total is not None and now - last >= PLAIN_INTERVAL_S:
                left_s = (now - started) / num_done * (total - num_done)
                self._console.print(f"{title} {num_done}/{total}, {left_s:.0f} s left")
                last = now

        return tick
