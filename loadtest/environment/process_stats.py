"""Looks at a process from outside: memory, processor time, file descriptors, threads.

Knows: Linux's /proc. Does not know: what the process does.
"""

import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from quill.loadtest.environment.watcher import Watcher

LOOK_S = 1.0


class ProcessSample(NamedTuple):
    at_s: float  # since 1970
    memory_mb: float  # resident
    num_fds: int
    num_threads: int
    cpu_s: float = 0.0  # of all its threads, since it began


def look_at(pid: int) -> ProcessSample:
    entries = _status(pid)
    num_fds = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    memory_mb = _kilobytes(entries["VmRSS"]) / 1024
    return ProcessSample(time.time(), memory_mb, num_fds, int(entries["Threads"]), _cpu_s(pid))


def peak_bytes_of(pid: int) -> int:
    """The most memory that a process has had at a time."""
    return _kilobytes(_status(pid)["VmHWM"]) * 1024


def _status(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return dict(line.split(":", 1) for line in text.splitlines())


def _cpu_s(pid: int) -> float:
    # The name, in brackets, may have spaces; user and system time are the 12th and 13th after it.
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _kilobytes(entry: str) -> int:
    return int(entry.split()[0])


def slope_mb_per_minute(samples: Sequence[ProcessSample]) -> float:
    """Of the straight line that fits best."""
    mean_s = sum(look.at_s for look in samples) / len(samples)
    mean_mb = sum(look.memory_mb for look in samples) / len(samples)
    spread = sum((look.at_s - mean_s) ** 2 for look in samples)
    together = sum((look.at_s - mean_s) * (look.memory_mb - mean_mb) for look in samples)
    return 60 * together / spread if spread else 0.0


def busy_cores(samples: Sequence[ProcessSample]) -> list[float]:
    """Between each look and the next."""
    pairs = itertools.pairwise(samples)
    return [(b.cpu_s - a.cpu_s) / max(b.at_s - a.at_s, 1e-9) for a, b in pairs]


def watch_process(pid: int | None) -> Watcher[ProcessSample]:
    return Watcher(lambda: _look_if_there(pid), LOOK_S)


def _look_if_there(pid: int | None) -> ProcessSample | None:
    try:
        return None if pid is None else look_at(pid)
    except (OSError, KeyError):  # it has ended, or is about to
        return None
