"""This machine, and processes on it that the load test starts or samples.

Knows: subprocess, sockets, threads, git, Linux's /proc. Does not know: what a process does.
"""

import itertools
import os
import platform
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parents[2]
SAMPLE_S = 1.0

_Sample = TypeVar("_Sample")


def free_port() -> int:
    """For programs that can't share it with its holder; another process may take it meanwhile."""
    with reserved_port() as port:
        return port


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port at which nobody listens, and that the system gives to nobody else: a server that sets
    SO_REUSEADDR, as they do, may listen there, also again after its end."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def stop_process(process: "subprocess.Popen[Any]", timeout_s: float) -> None:
    """Waits for a process that was signalled to end; kills it after the timeout."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def last_line(log: Path) -> str:
    """The likely reason why a process has ended."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"


class Sampler(Generic[_Sample]):
    """Takes samples in a thread, inside `with`. None is not kept: there was nothing to sample."""

    def __init__(self, sample: Callable[[], _Sample | None], every_s: float) -> None:
        self.samples: list[_Sample] = []
        self._sample = sample
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Sampler[_Sample]":
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

    def _run(self) -> None:
        while not self._stop.is_set():
            sample = self._sample()
            if sample is not None:
                self.samples.append(sample)
            self._stop.wait(self._every_s)


class ProcessSample(NamedTuple):
    """A server has its engine in a child process: memory and time are those of both together."""

    at_s: float  # since 1970
    memory_mb: float  # resident, of the process and its children
    num_fds: int  # of the process itself
    num_threads: int
    cpu_s: float = 0.0  # of all threads of the process and its children, since they started


def sample_process(pid: int) -> ProcessSample:
    num_threads = int(_status(pid)["Threads"])
    num_fds = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    pids = process_tree(pid)
    memory_mb = sum(_kilobytes(each, "VmRSS") for each in pids) / 1024
    return ProcessSample(time.time(), memory_mb, num_fds, num_threads, sum(map(_cpu_s, pids)))


def peak_bytes_of(pid: int) -> int:
    """The peaks of the resident memory of a process and its children, added."""
    return sum(_kilobytes(each, "VmHWM") for each in process_tree(pid)) * 1024


def process_tree(pid: int) -> list[int]:
    """The process, its children, and theirs."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for file in files for child in file.read_text().split()]
    return [pid, *(each for child in children for each in process_tree(child))]


def _status(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return dict(line.split(":", 1) for line in text.splitlines())


def _cpu_s(pid: int) -> float:
    # The name, in brackets, may have spaces; user and system time are the 12th and 13th after it.
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _kilobytes(pid: int, entry: str) -> int:
    return int(_status(pid).get(entry, "0 kB").split()[0])  # a process that has ended has none


def slope_mb_per_minute(samples: Sequence[ProcessSample]) -> float:
    """Of the least-squares line through resident memory."""
    mean_s = sum(sample.at_s for sample in samples) / len(samples)
    mean_mb = sum(sample.memory_mb for sample in samples) / len(samples)
    spread = sum((sample.at_s - mean_s) ** 2 for sample in samples)
    together = sum((each.at_s - mean_s) * (each.memory_mb - mean_mb) for each in samples)
    return 60 * together / spread if spread else 0.0


def busy_cores(samples: Sequence[ProcessSample]) -> list[float]:
    """Between each sample and the next."""
    pairs = itertools.pairwise(samples)
    return [(b.cpu_s - a.cpu_s) / max(b.at_s - a.at_s, 1e-9) for a, b in pairs]


def watch_process(pid: int | None) -> Sampler[ProcessSample]:
    return Sampler(lambda: _sample_if_running(pid), SAMPLE_S)


def _sample_if_running(pid: int | None) -> ProcessSample | None:
    try:
        return None if pid is None else sample_process(pid)
    except (OSError, KeyError):  # it has ended, or is about to
        return None


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
    name = _git("rev-parse", "--short=12", "HEAD")
    if not name:
        return "unknown: not a git checkout"
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return f"{name} (with changes)" if changed else name


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
