"""What a soak does to a server: takes CPU time from it, kills its processes, reloads its bundle.

Knows: `quill serve`'s processes by their command lines, signals, what the log says afterwards.
Does not know: requests.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from quill.loadtest.environment.process import Sampler, process_tree

NUM_LOOPS = 8
STARVE_S = 10.0
NOTICE_S = 120.0
POLL_S = 0.2


class Fault(NamedTuple):
    """`inject` gets the supervisor's process, and returns whether there was something to harm."""

    inject: Callable[[int], bool]
    log_text: str = ""  # which the server's log has once for each; empty: it notices nothing


@contextmanager
def busy_loops(number: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _starve(_: int) -> bool:
    with busy_loops(NUM_LOOPS):
        time.sleep(STARVE_S)
    return True


def _kill(module: str, pid: int) -> bool:
    """The oldest process that runs this module: the grammar worker's children run it, too."""
    found = [each for each in process_tree(pid) if module in _command_line(each)]
    if found:
        os.kill(min(found), signal.SIGKILL)
    return bool(found)


def _reload(pid: int) -> bool:
    os.kill(pid, signal.SIGHUP)
    return True


def _command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")


FAULTS = {
    "starve": Fault(_starve),
    "kill-engine": Fault(partial(_kill, "quill.server.process.engine_main"), "the engine is back"),
    "kill-frontend": Fault(
        partial(_kill, "quill.server.serve.frontend_main"), "the frontend's process ended"
    ),
    "kill-worker": Fault(
        partial(_kill, "quill.server.grammar.worker"), "the grammar worker has died"
    ),
    "reload": Fault(_reload, "is on duty now"),
}


def inject(pid: int, names: Sequence[str], every_s: float, log: Path) -> Sampler[str]:
    """In turns, in a thread, inside `with`. `samples` are the names of those that happened. Each
    waits until the server noticed the one before: a reload while the engine starts is lost."""
    turns, injected = cycle(names), list[str]()

    def inject_next() -> str | None:
        wait_until_noticed(log, injected)
        name = next(turns, None)
        with suppress(OSError):  # a process ended while it was looked at
            if name is not None and FAULTS[name].inject(pid):
                injected.append(name)
                return name
        return None

    return Sampler(inject_next, every_s)


def wait_until_noticed(log: Path, injected: Sequence[str]) -> None:
    """Until the server's log has each of these faults, or NOTICE_S have passed."""
    end_s = time.monotonic() + NOTICE_S
    while time.monotonic() < end_s:
        text = log.read_text()  # not parsed: after an hour it has 100,000 lines
        if all(injected.count(name) <= text.count(FAULTS[name].log_text) for name in set(injected)):
            return
        time.sleep(POLL_S)


def num_logged(log: Sequence[Mapping[str, Any]], name: str) -> int:
    """How often the server noticed this fault."""
    return sum(FAULTS[name].log_text in str(entry.get("message", "")) for entry in log)
