"""Looks at a process from outside: memory, file descriptors, threads.

Knows: Linux's /proc. Does not know: what the process does.
"""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

LOOK_S = 1.0


class ProcessLook(NamedTuple):
    at_s: float  # monotonic
    memory_mb: float  # resident
    num_fds: int
    num_threads: int


def look_at(pid: int) -> ProcessLook:
    entries = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    memory_kb = int(entries["VmRSS"].split()[0])
    num_fds = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return ProcessLook(time.monotonic(), memory_kb / 1024, num_fds, int(entries["Threads"]))


def slope_mb_per_minute(looks: Sequence[ProcessLook]) -> float:
    """Of the straight line that fits best."""
    mean_s = sum(look.at_s for look in looks) / len(looks)
    mean_mb = sum(look.memory_mb for look in looks) / len(looks)
    spread = sum((look.at_s - mean_s) ** 2 for look in looks)
    together = sum((look.at_s - mean_s) * (look.memory_mb - mean_mb) for look in looks)
    return 60 * together / spread if spread else 0.0


class ProcessWatcher:
    """Looks once a second, from `with` to its end."""

    def __init__(self, pid: int) -> None:
        self.looks: list[ProcessLook] = []
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "ProcessWatcher":
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
        while not self._stop.wait(LOOK_S):
            try:
                self.looks.append(look_at(self._pid))
            except OSError:
                return  # it has ended
