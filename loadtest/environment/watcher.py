"""Looks at something again and again while something else goes on.

Knows: threads. Does not know: what is looked at.
"""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

_Look = TypeVar("_Look")


class Watcher(Generic[_Look]):
    """Looks from a thread of its own, from `with` to its end. None says that there was nothing."""

    def __init__(self, look: Callable[[], _Look | None], every_s: float) -> None:
        self.samples: list[_Look] = []
        self._look = look
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watcher[_Look]":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            look = self._look()
            if look is not None:
                self.samples.append(look)
            self._stop.wait(self._every_s)
