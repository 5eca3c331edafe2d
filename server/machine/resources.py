"""How much memory and how many cores this process may use, and which thread waits for others.

Knows: Linux's files, control groups of both versions. Does not know: what they are wanted for.

A container, or a service of systemd, is a group of processes with limits of its own, within other
groups with theirs. Who plans with the whole machine's memory there is killed when it is used.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
# A group's limit, what it uses, and which part of that is files that would make room.
_MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(root: Path = ROOT) -> int:
    """Memory that can be had without swapping, within the limits of every group."""
    left = [_machine_bytes(root)]
    for group in _groups(root, "memory"):
        for limit_name, used_name, reclaimable in _MEMORY:
            limit, used = _numbers(group / limit_name), _numbers(group / used_name)
            if limit:
                files = _field(group / "memory.stat", reclaimable)
                left.append(limit[0] - max(0, sum(used) - files))
    return max(0, min(left))


def num_cores(root: Path = ROOT) -> int:
    """Whole ones: with more threads than that, all are held up when the group's time is over."""
    cores = [os.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):
        cores = [len(os.sched_getaffinity(0))]
    for group in _groups(root, "cpu"):
        quota = _numbers(group / "cpu.max") or [
            *_numbers(group / "cpu.cfs_quota_us"),
            *_numbers(group / "cpu.cfs_period_us"),
        ]
        if len(quota) == 2 and quota[0] > 0:
            cores.append(quota[0] // quota[1])
    return max(1, min(cores))


def lower_priority(by: int) -> None:
    """Of this thread, from now on. Without Linux the whole process would wait, so nothing does."""
    if sys.platform != "linux":
        return
    own = threading.get_native_id()
    with contextlib.suppress(OSError):  # a sandbox may forbid it, and then all others are slower
        os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + by)


def _machine_bytes(root: Path) -> int:
    available = _field(root / "proc/meminfo", "MemAvailable:") * 1024
    return available or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """This process's own and all that it is in. In a container some can't be seen, or only one."""
    mounts = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2; "unified" is where it is beside version 1
            tops = [mounts, mounts / "unified"]
        elif controller in controllers.split(","):
            tops = [mounts / controller]
        else:
            continue
        own = Path(path.lstrip("/"))
        for top in tops:
            yield from (top / each for each in (own, *own.parents) if ".." not in each.parts)


def _numbers(path: Path) -> list[int]:
    """Empty: there is no such file, or no limit ("max")."""
    try:
        return [int(word) for word in _text(path).split()]
    except ValueError:
        return []


def _field(path: Path, name: str) -> int:
    rows = (line.split() for line in _text(path).splitlines())
    return next((int(row[1]) for row in rows if row[0] == name), 0)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
