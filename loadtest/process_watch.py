"""Looks at a process from outside: memory, file descriptors, threads.

Knows: Linux's /proc. Does not know: what the process does.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from loadtest.watching import Watcher

LOOK_S = 1.0


class ProcessSample(NamedTuple):
    at_s: float  # monotonic
    memory_mb: float  # resident
    num_fds: int
    num_threads: int


def look_at(pid: int) -> ProcessSample:
    entries = _status(pid)
    num_fds = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return ProcessSample(
        time.monotonic(), _kilobytes(entries["VmRSS"]) / 1024, num_fds, int(entries["Threads"])
    )


def peak_bytes_of(pid: int) -> int:
    """The most memory that a process has had at a time."""
    return _kilobytes(_status(pid)["VmHWM"]) * 1024


def _status(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return dict(line.split(":", 1) for line in text.splitlines())


def _kilobytes(entry: str) -> int:
    return int(entry.split()[0])


def slope_mb_per_minute(samples: Sequence[ProcessSample]) -> float:
    """Of the straight line that fits best."""
    mean_s = sum(look.at_s for look in samples) / len(samples)
    mean_mb = sum(look.memory_mb for look in samples) / len(samples)
    spread = sum((look.at_s - mean_s) ** 2 for look in samples)
    together = sum((look.at_s - mean_s) * (look.memory_mb - mean_mb) for look in samples)
    return 60 * together / spread if spread else 0.0


def watch_process(pid: int) -> Watcher[ProcessSample]:
    return Watcher(lambda: _look_if_there(pid), LOOK_S)


def _look_if_there(pid: int) -> ProcessSample | None:
    try:
        return look_at(pid)
    except OSError:  # it has ended
        return None
