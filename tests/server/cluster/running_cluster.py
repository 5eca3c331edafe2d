"""A cluster for tests: real Ray, real HAProxy, on this machine.

Knows: how it is started, its replicas' processes and metrics. Does not know: what is done to it.
"""

import contextlib
import json
import queue
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from quill.server.cluster.environment import free_port
from quill.server.cluster.local_ray import LocalCluster
from quill.server.cluster.plan import Plan
from quill.server.cluster.replica.options import ReplicaOptions
from tests.server.process import wait_until

ROOT = Path(__file__).resolve().parents[3]
START_S = 240.0  # half a minute, unless others keep the machine busy
STOP_S = 120.0
LONGEST_ANSWER_S = 100.0
_LINE = re.compile(r"^(quill_\w+)\{(.*?)\} (\S+)$", re.MULTILINE)


class RunningCluster:
    def __init__(self, process: "subprocess.Popen[str]", plan: Plan) -> None:
        self._process = process
        self._plan = plan
        self._told: queue.Queue[dict[str, Any]] = queue.Queue()
        self.progress: dict[str, Any] = {}
        self.environment: dict[str, str] = {}  # of those who want to reach its Ray
        self._listening = threading.Thread(target=self._listen)
        self._listening.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._plan.port}"

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self._plan.options.metrics_port}/metrics"

    def change(self, **changes: Any) -> None:
        """Of the plan, as `serve deploy` of a changed file does it."""
        self._tell(changes)

    def wait_for_replicas(self, number: int, timeout_s: float = START_S) -> None:
        """So many run, and none starts or stops."""
        self.wait_for(lambda told: told["replicas"] == {"RUNNING": number}, timeout_s)

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        while not (self.progress and condition(self.progress)):
            assert time.monotonic() < end_s, f"never happened; now it is {self.progress}"
            assert self._process.poll() is None, "it has ended"
            try:
                self.progress = self._told.get(timeout=1.0)
            except queue.Empty:
                continue

    def replica_pids(self) -> list[int]:
        own = {self._process.pid}
        parents = _parents()
        while more := {pid for pid, parent in parents.items() if parent in own} - own:
            own |= more
        return sorted(pid for pid in own if "ServeReplica:quill:replica" in _title(pid))

    def metric(self, name: str, **labels: str) -> dict[str, float]:
        """The sum of all that have these labels, by replica."""
        first = self._plan.options.metrics_port
        assert first is not None
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        sums: dict[str, float] = {}
        for page in filter(None, (_page(port) for port in range(first, first + 6))):
            for found, given, value in _LINE.findall(page):
                parts = given.split(",")
                replica = next(each for each in parts if each.startswith("replica="))
                sums.setdefault(replica, 0.0)
                if found == name and all(each in parts for each in wanted):
                    sums[replica] += float(value)
        return sums

    def join(self) -> None:
        """After the process has ended."""
        self._listening.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"environment"'):
                self.environment = json.loads(line)["environment"]
            elif line.startswith("{"):
                self._told.put(json.loads(line))

    def _tell(self, wish: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(wish) + "\n")
        self._process.stdin.flush()
        self.progress = {}


def _parents() -> dict[int, int]:
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return found


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _page(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
            return str(reply.read().decode())
    except (urllib.error.URLError, ConnectionError):
        return ""


def make_plan(options: ReplicaOptions, **changes: Any) -> Plan:
    plan = Plan(
        options=replace(options, metrics_port=20000 + free_port() % 10000, one_machine=True),
        least=2,
        most=2,
        host="127.0.0.1",
        port=free_port(),
        http_port=free_port(),
        cpus=1,
        target_requests=4,
        longest_answer_s=LONGEST_ANSWER_S,
        drain_s=2.0,
    )
    return replace(plan, **changes)


@contextmanager
def running_cluster(plan: Plan, log: Path) -> Iterator[RunningCluster]:
    command = [sys.executable, "-m", "tests.server.cluster.driver", json.dumps(asdict(plan))]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
        )
    cluster = RunningCluster(process, plan)
    try:
        cluster.wait_for_replicas(plan.least)
        wait_until(lambda: LocalCluster(None).answers(plan), "it answers", START_S)
        yield cluster
    except BaseException:
        print(log.read_text("utf-8", "replace")[-5000:])
        raise
    finally:
        assert process.stdin is not None
        process.stdin.close()  # then it ends
        try:
            process.wait(STOP_S)
        finally:
            process.kill()
            cluster.join()
