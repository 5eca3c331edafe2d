"""Faults that a test can switch on inside a server's engine, between two of its steps.

Knows: which methods of the session a step runs. Does not know: what the fault should lead to.

`CODE` runs in the engine's process before it starts, as Python's sitecustomize. A fault is a file
in the directory that QUILL_FAULTS names: `raise` fails every step while it is there, and a step
that finds a pipe named `hang` waits until somebody writes into it. `slow` makes steps take 20 ms;
with `abort` the process crashes while it loads.
"""

import os
from pathlib import Path

VARIABLE = "QUILL_FAULTS"
CODE = """
import os, pathlib, sys, time


def faulty(run):
    def step(self, *arguments):
        if (faults / "slow").exists():
            time.sleep(0.02)
        if (faults / "hang").exists():
            (faults / "hangs").touch()
            (faults / "hang").read_text()
        if (faults / "raise").exists():
            raise RuntimeError("injected, for ever")
        return run(self, *arguments)

    return step


if "quill.server.process.engine_main" in sys.orig_argv:
    from quill.server.engine.model_runner import OrtSession

    faults = pathlib.Path(os.environ["QUILL_FAULTS"])
    if (faults / "abort").exists():
        os.abort()
    OrtSession.step = faulty(OrtSession.step)
"""


class Faults:
    """The switches. None is on at first."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        (directory / "sitecustomize.py").write_text(CODE)
        paths = (str(directory), os.environ.get("PYTHONPATH", ""))
        self.environment = {VARIABLE: str(directory), "PYTHONPATH": os.pathsep.join(paths)}

    def start(self, name: str) -> None:
        (self._directory / name).touch()

    def end(self, name: str) -> None:
        (self._directory / name).unlink()

    def is_on(self, name: str) -> bool:
        return (self._directory / name).exists()

    def hang(self) -> None:
        os.mkfifo(self._directory / "hang")

    @property
    def hangs(self) -> bool:
        return (self._directory / "hangs").exists()

    def let_go(self) -> None:
        """Whoever hangs goes on, and nobody hangs any more."""
        pipe = (self._directory / "hang").open("w")
        self.end("hang")
        self.end("hangs")
        pipe.close()
