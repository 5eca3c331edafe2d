"""Runs Locust as processes of its own, and shows how it gets on.

Knows: Locust's command line, what the locustfile prints. Does not know: what is made of records.
Locust patches the standard library of the process that imports it: never this one.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from quill.loadtest.environment.processes import free_port, wait_or_kill
from quill.loadtest.errors import LoadtestError
from quill.loadtest.protocols.names import DoorName
from quill.loadtest.workload.ask import Facts
from quill.loadtest.workload.schedule import Plan

LOCUSTFILE = Path(__file__).parents[1] / "locustfile.py"
PROGRESS = "PROGRESS "
_FAILED_REQUESTS = 1  # Locust's exit code then: the report tells of them
_STOP_S = 30.0

Process: TypeAlias = "subprocess.Popen[str]"
Show = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Load:
    """A load, the processes that make it, and the file that it leaves."""

    plan: Plan
    address: str  # of the door
    records: Path
    log: Path
    num_users: int = 1
    num_workers: int = 0  # 0: Locust's one process makes the load itself
    access_options: tuple[str, ...] = ()
    facts: Facts | None = None  # None: Locust asks the server itself
    door: DoorName = "grpc"


def run_locust(load: Load, show: Show) -> bool:
    """Until all requests have ended. False: Ctrl-C came first, and cut off those that ran."""
    with ExitStack() as stack:
        log = stack.enter_context(load.log.open("ab"))
        port = free_port() if load.num_workers else 0
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
        *("--protocol", load.door),
        *("--users", str(load.num_users), "--spawn-rate", f"{spawn_rate:g}"),
        *(*plan.arguments(), "--records", str(load.records), "--progress"),
        *(() if load.facts is None else ("--facts", json.dumps(asdict(load.facts)))),
    ]


def _start(stack: ExitStack, arguments: Sequence[str], log: int) -> Process:
    process = subprocess.Popen(
        [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if "--worker" not in arguments else log,
        stderr=log,
        text=True,
        process_group=0,  # Ctrl-C is for us: we end it when its records are in
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
    """A worker has heard from its master that it is over; whoever has not ended, is ended."""
    process.terminate()  # does nothing to one that has
    wait_or_kill(process, _STOP_S)
    if process.stdout is not None:
        process.stdout.close()
