"""A cluster of our own on this machine, for as long as it is needed.

Knows: `quill cluster up` as a process, what it prints. Does not know: Ray, what is asked of it.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quill.loadtest.environment.processes import free_port, wait_or_kill
from quill.loadtest.errors import NoServerError

_READY = "Serving at "
_STOP_S = 120.0


@contextmanager
def own_cluster(log: Path, bundle: Path, *options: str) -> Iterator[str]:
    """Its address. `log` gets what it says on stderr."""
    arguments = [sys.executable, "-m", "quill", "cluster", "up", str(bundle)]
    arguments += ["--port", str(free_port()), *options]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=errors, text=True, process_group=0
        )
    try:
        yield _read_address(process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        wait_or_kill(process, _STOP_S)


def _read_address(process: "subprocess.Popen[str]", log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(_READY):
            return line.removeprefix(_READY).partition(". ")[0]
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    raise NoServerError(
        f"`quill cluster up` ended with code {process.wait()}: {' '.join(said) or 'no word'}"
    )
