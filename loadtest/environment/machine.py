"""Where and on what a measurement was made: machine, commit, command, versions.

Knows: Linux's own files, git. Does not know: what is measured.
"""

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path


def machine_info() -> dict[str, str]:
    """What is printed beside every number, in this order."""
    return {
        "machine": f"{cpu_name()}, {num_cores()} cores, {memory_gib():.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "commit": commit(),
        "command": shlex.join(["quill", *sys.argv[1:]]),
    }


def num_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def commit() -> str:
    """Of the source that runs, and whether it was changed since."""
    root = Path(__file__).resolve().parents[2]
    name = _git(root, "rev-parse", "--short=12", "HEAD")
    if not name:
        return "unknown: not a git checkout"
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return f"{name} (with changes)" if changed else name


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
