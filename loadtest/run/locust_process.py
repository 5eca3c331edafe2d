"""Runs Locust in processes of its own, and shows their progress.

Knows: Locust's command line, the locustfile's output, terminals. Does not know: reports.
Locust patches the standard library of the process that imports it: never this one.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from quill.loadtest.environment.process import reserved_port, stop_process
from quill.loadtest.errors import LoadtestError
from quill.loadtest.protocols.names import ProtocolName
from quill.loadtest.workload.request import ModelInfo
from quill.loadtest.workload.schedule import PROGRESS, Plan

LOCUSTFILE = Path(__file__).parents[1] / "locustfile.py"
_FAILED_REQUESTS = 1  # Locust's exit code if requests failed: the report has them
_STOP_S = 30.0
_PLAIN_EVERY_S = 5.0

Process: TypeAlias = "subprocess.Popen[str]"
Show = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Load:
    """A load, the processes that make it, and the file that it leaves."""

    plan: Plan
    address: str  # for the protocol
    records: Path
    log: Path
    num_users: int = 1
    num_workers: int = 0  # 0: Locust's one process makes the load itself
    access_options: tuple[str, ...] = ()
    info: ModelInfo | None = None  # None: Locust calls GetModel itself
    protocol: ProtocolName = "grpc"


def run_locust(load: Load, show: Show) -> bool:
    """Returns when all requests have ended. False: Ctrl-C came first, and ended those that ran."""
    with ExitStack() as stack:
        log = stack.enter_context(load.log.open("ab"))
        port = stack.enter_context(reserved_port()) if load.num_workers else 0
        main = _start(stack, _main_arguments(load, port), log.fileno())
        workers = [
            _start(stack, ["--worker", "--master-port", str(port)], log.fileno())
            for _ in range(load.num_workers)
        ]
        try:
            _follow(main, workers, show, load.log)
        except KeyboardInterrupt:
            main.terminate()  # it collects what its workers have, and ends them
            main.communicate(timeout=_STOP_S)
            return False
        code = main.wait()
    if code not in (0, _FAILED_REQUESTS):
        raise LoadtestError(f"Locust ended with code {code}; {load.log} says why")
    return True


def _main_arguments(load: Load, port: int) -> list[str]:
    plan = load.plan
    ramp_s = plan.ramp_s if not plan.rate else 0.0
    spawn_rate = load.num_users / ramp_s if ramp_s else min(100, load.num_users)
    master = ["--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", str(port)]
    master += ["--expect-workers", str(load.num_workers)]
    return [
        *(master if load.num_workers else []),
        *("--headless", "--only-summary", "--host", load.address, *load.access_options),
        *("--protocol", load.protocol),
        *("--users", str(load.num_users), "--spawn-rate", f"{spawn_rate:g}"),
        *(*plan.arguments(), "--records", str(load.records), "--progress"),
        *(() if load.info is None else ("--model-info", json.dumps(asdict(load.info)))),
    ]


def _start(stack: ExitStack, arguments: Sequence[str], log: int) -> Process:
    process = subprocess.Popen(
        [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if "--worker" not in arguments else log,
        stderr=log,
        text=True,
        process_group=0,  # Ctrl-C must not reach it: it is ended when its records are written
    )
    stack.callback(_stop, process)
    return process


def _follow(main: Process, workers: Sequence[Process], show: Show, log: Path) -> None:
    assert main.stdout is not None
    for line in main.stdout:
        if line.startswith(PROGRESS):
            show(json.loads(line.removeprefix(PROGRESS)))
        if any(worker.poll() not in (None, 0, _FAILED_REQUESTS) for worker in workers):
            raise LoadtestError(f"a Locust worker ended before its time; {log} says why")


def _stop(process: Process) -> None:
    """Ends a process that hasn't ended by itself, as workers do after their master's message."""
    process.terminate()  # does nothing if it has
    stop_process(process, _STOP_S)
    if process.stdout is not None:
        process.stdout.close()


class ProgressLine:
    """On a terminal one line that is overwritten; elsewhere a line every five seconds."""

    def __init__(self) -> None:
        self._on_terminal = sys.stdout.isatty()
        self._printed_s = time.monotonic()
        self._text = ""
        self._is_printed = True

    def show(self, text: str) -> None:
        self._text, self._is_printed = text, False
        if self._on_terminal:
            print(f"\r\x1b[2K{text}", end="", flush=True)
        elif time.monotonic() - self._printed_s >= _PLAIN_EVERY_S:
            self._print()

    def end(self) -> None:
        """Leaves the last text."""
        if self._on_terminal and self._text:
            print(flush=True)
        elif not self._is_printed:
            self._print()

    def _print(self) -> None:
        print(self._text, flush=True)
        self._printed_s, self._is_printed = time.monotonic(), True


def describe_progress(progress: dict[str, Any]) -> str:
    """Of what the locustfile prints once a second."""
    elapsed_s = max(progress["elapsed_s"], 1e-9)
    running = "" if progress["running"] is None else f"  {progress['running']} in flight"
    return (
        f"{elapsed_s:5.0f} s  {progress['users']} users{running}  "
        f"{progress['requests']:,} requests  "
        f"{progress['tokens'] / elapsed_s:,.0f} tokens/s  {progress['errors']:,} errors"
    )
