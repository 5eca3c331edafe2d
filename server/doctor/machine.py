"""What this machine has, as far as it matters to a bundle.

Knows: Linux's files, ONNX Runtime's providers, nvidia-smi. Does not know: bundles, speed.

A report is made to be sent: no name of a machine, a user or a directory is in it.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import onnxruntime

from quill.export.operators.library import kernels, library_path, operators_problem
from quill.server.loading.choices import megabytes
from quill.server.machine.onnx_session import cuda_problem
from quill.server.machine.resources import available_bytes, num_cores

GPU_QUERY = "name,memory.total,driver_version,compute_cap"
TIMEOUT_S = 20.0
FIND_COMPILER = (sys.executable, "-m", "quill.export.operators.build", "--find-compiler")
INSTRUCTIONS = ("avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_DIRECTORY = re.compile(r"(?<![\w.])/(?:[^\s/:'\"]+/)+")


def describe_machine() -> dict[str, str]:
    """By what it is called; in the order in which it is shown."""
    return {name: without_directories(value) for name, value in _rows()}


def without_directories(text: str) -> str:
    """Of a path only the last name stays."""
    return _DIRECTORY.sub("", text)


class Others:
    """How much of the cores' time other programs took since this was made, and other machines on
    the same processor. Nothing is known without Linux."""

    def __init__(self) -> None:
        self._start = time.monotonic(), _busy_seconds(), time.process_time()

    def share(self) -> float:
        now = time.monotonic(), _busy_seconds(), time.process_time()
        wall, busy, own = (end - start for end, start in zip(now, self._start, strict=True))
        return max(0.0, busy - own) / (wall * (os.cpu_count() or 1))


def _busy_seconds() -> float:
    """Of all cores: neither idle nor waiting for a disk; steal, too."""
    words = _text(Path("/proc/stat")).split(maxsplit=9)[1:9]
    ticks = [int(word) for word in words]
    return (sum(ticks) - sum(ticks[3:5])) / os.sysconf("SC_CLK_TCK")


def _rows() -> Iterator[tuple[str, str]]:
    problem, flags = operators_problem(), _cpu_info("flags").split()
    yield "processor", f"{_cpu_info('model name') or platform.processor()} ({platform.machine()})"
    yield "instructions", ", ".join(name for name in INSTRUCTIONS if name in flags) or "unknown"
    yield "kernels", "none" if problem else kernels(library_path())
    if chosen := os.environ.get("QUILL_KERNELS"):
        yield "QUILL_KERNELS", chosen
    virtual = ", virtual" if "hypervisor" in flags else ""
    yield "cores", f"{num_cores()} for this process, of {os.cpu_count()}{virtual}"
    yield "caches", ", ".join(_caches()) or "unknown"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield "memory", f"{megabytes(available_bytes())} for this process, of {megabytes(total)}"
    yield "huge pages", _chosen(_text(_HUGE_PAGES)) or "unknown"
    yield "system", f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    providers = ", ".join(onnxruntime.get_available_providers())
    yield "ONNX Runtime", f"{onnxruntime.__version__}: {providers}"
    yield "cards", "; ".join(_cards()) or "none that nvidia-smi shows"
    yield "CUDA", cuda_problem() or "works"
    yield "compiler", _output(*FIND_COMPILER) or "none"
    yield "operators", problem or f"{library_path().name}, whole"


def _cards() -> list[str]:
    path = shutil.which("nvidia-smi")
    if path is None:
        return []
    found = _output(path, f"--query-gpu={GPU_QUERY}", "--format=csv,noheader")
    return found.splitlines()


def _output(*command: str) -> str:
    """Empty: it failed."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _cpu_info(name: str) -> str:
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        field, _, value = line.partition(":")
        if field.strip() == name:
            return value.strip()
    return ""


def _caches() -> Iterator[str]:
    for path in sorted(_CACHES.glob("index*")):
        if (kind := _text(path / "type").strip()) != "Instruction":
            yield f"L{_text(path / 'level').strip()} {kind.lower()} {_text(path / 'size').strip()}"


def _chosen(text: str) -> str:
    """Linux puts it in brackets."""
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
