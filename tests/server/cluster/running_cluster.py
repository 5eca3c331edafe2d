"""A cluster for tests: real Ray, real HAProxy, on this machine.

Knows: how a cluster starts, its replicas' processes and metrics. Does not know: what tests do.
"""

import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from quill.server.cluster.local_ray import is_serving
from quill.server.cluster.plan import Plan, ReplicaArgs, write_serve_config
from quill.server.prometheus_text import read_samples
from quill.server.settings import Settings
from tests.server.process import ROOT, wait_until

START_S = 240.0  # half a minute on a quiet machine
STOP_S = 120.0
LONGEST_ANSWER_S = 100.0


class RunningCluster:
    def __init__(self, process: "subprocess.Popen[str]", plan: Plan, directory: Path) -> None:
        self._process = process
        self._plan = self._original = plan
        self._file = directory / "serve.yaml"
        self.environment: dict[str, str] = {}  # for programs that connect to its Ray
        self._progress: dict[str, Any] = {}
        self._listening = threading.Thread(target=self._listen)
        self._listening.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._plan.args.port}"

    def deploy(self, **changes: Any) -> None:
        """`serve deploy` of a changed file."""
        self._plan = replace(self._plan, **changes)
        self._file.write_text(write_serve_config(self._plan))
        command = [str(Path(sys.executable).with_name("serve")), "deploy", str(self._file)]
        environment = {**os.environ, **self.environment}
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, check=False, timeout=START_S
        )
        assert done.returncode == 0, done.stderr

    def change_settings(self, **changes: Any) -> None:
        settings = replace(self._plan.args.settings, **changes)
        self.deploy(args=replace(self._plan.args, settings=settings))

    def restore(self) -> None:
        """The replicas of the beginning."""
        if self._plan != self._original:
            self.deploy(**vars(self._original))
        self.wait_for_replicas(self._original.min_replicas)

    def wait_for_replicas(self, number: int, timeout_s: float = START_S) -> None:
        """So many run, and none starts or stops."""
        self._wait_until(
            lambda: (
                self._progress.get("state") == "RUNNING"
                and self._progress["replicas"] == {"RUNNING": number}
            ),
            timeout_s,
        )

    def start(self, dashboard_port: int) -> None:
        self._wait_until(lambda: bool(self.environment))
        self.environment["RAY_DASHBOARD_ADDRESS"] = f"http://127.0.0.1:{dashboard_port}"
        self.deploy()
        self.wait_for_replicas(self._plan.min_replicas)
        self._wait_until(lambda: is_serving(self._plan))

    def _wait_until(self, condition: Callable[[], bool], timeout_s: float = START_S) -> None:
        def is_so() -> bool:
            assert self._process.poll() is None, "Ray has ended"
            return condition()

        wait_until(is_so, f"it is so; the progress is {self._progress}", timeout_s)

    def replica_pids(self) -> list[int]:
        return self.pids("ServeReplica:quill:replica")

    def pids(self, title: str) -> list[int]:
        """Processes of this cluster with `title` in their command lines."""
        own, processes = {self._process.pid}, list(_processes())
        while more := {pid for pid, parent, _ in processes if parent in own} - own:
            own |= more
        return sorted(pid for pid, _, command in processes if pid in own and title in command)

    def metric(self, name: str, **labels: str) -> list[float]:
        """Of each replica."""
        first = self._plan.args.settings.metrics_ports[0]
        pages = [_page(port) for port in range(first, first + 6)]
        return [read_samples(page).value(name, **labels) for page in pages if page]

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        finally:
            self._process.kill()
            self._listening.join()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"state"'):
                self._progress = json.loads(line)
            elif line.startswith("{"):
                self.environment = json.loads(line)


def _processes() -> Iterator[tuple[int, int, str]]:
    """Number, parent, command line."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            yield int(stat.parent.name), parent, stat.with_name("cmdline").read_text()


def _page(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
            return str(reply.read().decode())
    except (urllib.error.URLError, ConnectionError):
        return ""


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("", 0))
        return int(taken.getsockname()[1])


def make_plan(bundle: Path, settings: Settings, **changes: Any) -> Plan:
    args = ReplicaArgs(
        bundle=str(bundle),
        host="127.0.0.1",
        port=free_port(),
        one_machine=True,
        longest_answer_s=LONGEST_ANSWER_S,
        settings=replace(settings, metrics_port=20000 + free_port() % 10000),
    )
    plan = Plan(args=args, min_replicas=2, max_replicas=2, target_requests=4)
    return replace(plan, **changes)


@contextmanager
def running_cluster(plan: Plan, directory: Path) -> Iterator[RunningCluster]:
    port = free_port()
    command = [sys.executable, "-m", "tests.server.cluster.driver"]
    command += [pickle.dumps(plan).hex(), str(port)]
    log = directory / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
        )
    cluster = RunningCluster(process, plan, directory)
    try:
        cluster.start(port)
        yield cluster
    except BaseException:
        print(log.read_text("utf-8", "replace")[-5000:])
        raise
    finally:
        cluster.end()
