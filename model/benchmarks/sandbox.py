"""Runs generated programs in processes of their own, with limits, and says whether they passed.

Knows: processes, deadlines, what sandboxed_program.py reports. Does not know: benchmarks.
"""

import contextlib
import functools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any, NamedTuple

TIMEOUT_S = 10.0
MEMORY_BYTES = 1 << 30
_PROGRAM = Path(__file__).with_name("sandboxed_program.py")
# Threads aren't allowed, and numpy would start some.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
_MAX_DETAIL = 500


class Outcome(NamedTuple):
    passed: bool
    detail: str  # the last line of an error, or that time ran out
    layers: tuple[str, ...] = ()


def run_program(program: str, timeout_s: float = TIMEOUT_S) -> Outcome:
    """A program passes if it runs to its end: a failed assertion, an exit or a signal don't."""
    key = secrets.token_hex(16)
    request = {"program": program, "key": key, "memory_bytes": MEMORY_BYTES, "cpu_s": timeout_s}
    with (
        tempfile.TemporaryDirectory(prefix="quill-sandbox-") as directory,
        tempfile.TemporaryFile() as report,
        tempfile.TemporaryFile() as errors,
    ):
        in_time = _run(json.dumps(request).encode(), directory, report, errors, timeout_s)
        detail = "" if in_time else f"not finished after {timeout_s:g} s"
        found = _report(report, key) if in_time else None
        if found is not None:
            return Outcome(True, "", tuple(found["layers"]))
        return Outcome(False, detail or _last_line(errors))


def _run(
    request: bytes, directory: str, report: IO[bytes], errors: IO[bytes], timeout_s: float
) -> bool:
    process = subprocess.Popen(
        [sys.executable, "-I", str(_PROGRAM)],
        stdin=subprocess.PIPE,
        stdout=report,
        stderr=errors,
        cwd=directory,
        env=_ENVIRONMENT,
        start_new_session=True,
    )
    try:
        process.communicate(request, timeout_s)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _report(report: IO[bytes], key: str) -> dict[str, Any] | None:
    report.seek(0)
    with contextlib.suppress(ValueError, TypeError, KeyError):
        found: dict[str, Any] = json.loads(report.read())
        return found if found["key"] == key else None
    return None


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:_MAX_DETAIL] if lines else "ended without reaching its end"


@functools.cache
def isolation() -> str:
    """What keeps programs from the network, files and processes on this machine, in words."""
    layers = run_program("").layers
    if not {"network namespace", "seccomp"} & {*layers}:
        return f"limits, {', '.join(layers) or 'nothing else'}; THE NETWORK ISN'T CLOSED HERE"
    return ", ".join(("limits", *layers))
