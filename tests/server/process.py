"""`quill serve` as a process of its own, for tests that do harm to it.

Knows: how it is started, its log, its metrics, its place in /proc. Does not know: what the harm is.
"""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from quill.loadtest.environment.process import reserved_port as reserved_port
from quill.server.client.retry import Retries
from quill.server.client.sync_client import Client
from quill.server.prometheus_text import read_samples
from tests.server.scripted_session import TIMEOUT_S

ROOT = Path(__file__).resolve().parents[2]
# With Ctrl-C as at a terminal: who was started in the background ignores it, and so do children.
COMMAND_LINE = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from quill.__main__ import main; sys.exit(main())"
)
OPTIONS = ("--threads", "1", "--max-num-seqs", "4", "--precision", "fp32", "--kv-cache-mb", "64")
NEVER = Retries(max_retries=0)
PROMPT = [5, 6, 7]
PATIENCE_S = 120.0  # while a test does harm, answers may take long
_LISTENS = "0A"  # a state of Linux's sockets
_HTTP = re.compile(r"HTTP at http://\S+:(\d+)")
_METRICS = re.compile(r"metrics at (http://\S+)")


class ServerProcess:
    """A server that says it is ready."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self.process = process
        self._log = log
        self.address = self._read_address()
        found = _METRICS.search(self.log)
        self._metrics_url = found[1] if found else None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def children(self) -> dict[int, str]:
        """Of the supervisor: what each runs."""
        return children_of(self.pid)

    @property
    def engine_pid(self) -> int:
        """Of the engine's process; of the newest, if there are two."""
        return max(pid for pid, line in self.children.items() if "engine_main" in line)

    @property
    def frontend_pids(self) -> set[int]:
        return {pid for pid, line in self.children.items() if "frontend_main" in line}

    @property
    def frontend_pid(self) -> int:
        return max(self.frontend_pids)

    @property
    def worker_pid(self) -> int:
        """Of the grammar worker of the newest frontend."""
        return max(children_of(self.frontend_pid))

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def http_port(self) -> int:
        found = _HTTP.search(self.log)
        assert found is not None
        return int(found[1])

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all that have these labels."""
        return read_samples(self.metrics_page()).value(name, **labels)

    def metrics_page(self, timeout_s: float = TIMEOUT_S) -> str:
        assert self._metrics_url is not None
        with urllib.request.urlopen(self._metrics_url, timeout=timeout_s) as reply:
            return str(reply.read().decode())

    def num_ended(self, outcome: str) -> float:
        return self.metric("quill_requests_total", outcome=outcome)

    @property
    def num_started(self) -> float:
        """Requests that were scheduled."""
        kinds = ("hits", "misses")
        return sum(self.metric(f"quill_prefix_cache_{kind}_total") for kind in kinds)

    def is_idle(self) -> bool:
        """No sequence runs and no request waits."""
        return not self.metric("quill_sequences_running") and not self.metric(
            "quill_requests_waiting"
        )

    @property
    def num_fds(self) -> int:
        return len(list(Path(f"/proc/{self.frontend_pid}/fd").iterdir()))

    @property
    def num_connections(self) -> int:
        """That it has accepted: those that still wait for it have no file, and the inode 0."""
        tables = [
            Path(f"/proc/{self.frontend_pid}/net/{name}").read_text() for name in ("tcp", "tcp6")
        ]
        sockets = [line.split() for table in tables for line in table.splitlines()[1:]]
        own = [each for each in sockets if each[1].endswith(f":{self.port:04X}")]
        return sum(each[3] != _LISTENS and each[9] != "0" for each in own)

    @property
    def memory_bytes(self) -> int:
        """Of all its processes."""
        pids = [self.pid, *self.children]
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
        return pages * os.sysconf("SC_PAGE_SIZE")

    def signal(self, number: signal.Signals) -> None:
        """To the supervisor; what pauses a server goes to all its processes."""
        self.process.send_signal(number)
        if number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in self.children:
                os.kill(pid, number)

    def _read_address(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("Serving at "):
                return line.removeprefix("Serving at ").partition(". ")[0]
        raise AssertionError(f"the server ended with {self.process.wait()}: {self.log}")


def children_of(pid: int) -> dict[int, str]:
    """What each runs; one that has just ended runs nothing."""
    paths = Path(f"/proc/{pid}/task").glob("*/children")
    pids = [int(child) for path in paths for child in _read_if_there(path).split()]
    return {child: _read_if_there(Path(f"/proc/{child}/cmdline")) for child in pids}


def _read_if_there(path: Path) -> str:
    """Of /proc: threads and processes end while their files are listed."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def ask(server: ServerProcess, seed: int = 3, max_new_tokens: int = 8) -> list[int]:
    """What the server answers; always the same to the same."""
    with Client(server.address, NEVER) as client:
        answer = client.generate(
            PROMPT,
            seed=seed,
            max_new_tokens=max_new_tokens,
            ignore_eos=True,
            timeout_s=PATIENCE_S,
        )
    return list(answer.sequences[0].token_ids)


@contextmanager
def server_process(
    bundle: Path,
    log: Path,
    *options: str,
    port: int = 0,
    code: str = COMMAND_LINE,
    environment: Mapping[str, str] | None = None,
) -> Iterator[ServerProcess]:
    """`code`: what the process runs; it may put a fault in first."""
    command = serve_command(bundle, (*OPTIONS, *options), port, code)
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
        )
    try:
        yield ServerProcess(process, log)
    finally:
        process.kill()
        process.communicate()


def serve_command(
    bundle: Path, options: Sequence[str], port: int = 0, code: str = COMMAND_LINE
) -> list[str]:
    """The other ports are free ones: those beside `port` may be reserved for another server."""
    ports = ("--port", str(port), "--http-port", "0", "--metrics-port", "0")
    return [sys.executable, "-c", code, "serve", str(bundle), *ports, *options]


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Looks again and again: another process tells nobody when it is so."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"never happened: {what}"
        time.sleep(0.005)
