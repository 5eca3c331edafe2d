"""Servers and clusters that the load test starts, and any server's health and metrics.

Knows: `quill serve` and `quill cluster up` as processes, their logs, health, Prometheus metrics.
Does not know: what is requested.
"""

import json
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quill.loadtest.environment.process import Sampler, free_port, last_line, stop_process
from quill.loadtest.errors import NoServerError
from quill.server.client.access import Access
from quill.server.client.errors import CallError, diagnose
from quill.server.prometheus_text import Samples, read_samples

METRICS_OFFSET, HTTP_OFFSET = 1, 2  # from the gRPC port, unless the server's options differ
_POLL_S = 0.05
_STOP_S = 60.0
_CLUSTER_STOP_S = 120.0
_CLUSTER_READY = "Serving at "
SAMPLE_S = 0.25
WAITING, RUNNING = "quill_requests_waiting", "quill_sequences_running"
_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class StartedServer:
    address: str
    metrics_url: str | None
    http_address: str | None
    pid: int

    def address_for(self, protocol: str) -> str:
        """HTTP has a port of its own."""
        if protocol != "http":
            return self.address
        if self.http_address is None:
            raise NoServerError("the server has no HTTP: it was started with --http-port off")
        return self.http_address


@contextmanager
def start_server(
    log: Path,
    bundle: Path | str | None = None,
    *options: str,
    access: Access | None = None,
    python: str = sys.executable,
) -> Iterator[StartedServer]:
    """Serves the bundle (None: the default) on a free port. `python`: another checkout's."""
    given = [] if bundle is None else [str(bundle)]
    arguments = [python, "-m", "quill", "serve", *given, "--port", "0", *options]
    arguments += ["--log-format", "json"]  # overrides the options: the log is parsed
    with log.open("wb") as errors:
        # In a process group of its own: a terminal's Ctrl-C must not end the server early.
        process = subprocess.Popen(arguments, stderr=errors, process_group=0)
    try:
        ready = _wait_until_ready(process, log, arguments)
        wait_until_healthy(ready["address"], access=access)
        http = ready.get("http")
        http_address = None if http is None else urlsplit(http).netloc
        yield StartedServer(ready["address"], ready.get("metrics"), http_address, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        stop_process(process, _STOP_S)


@contextmanager
def start_cluster(log: Path, bundle: Path, *options: str) -> Iterator[str]:
    """Yields the address of a cluster on this machine. Its stderr goes to `log`."""
    arguments = [sys.executable, "-m", "quill", "cluster", "up", str(bundle)]
    arguments += ["--port", str(free_port()), *options]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=errors, text=True, process_group=0
        )
    try:
        assert process.stdout is not None
        ready = next((line for line in process.stdout if line.startswith(_CLUSTER_READY)), None)
        if ready is None:
            code, reason = process.wait(), last_line(log)
            raise NoServerError(f"`quill cluster up` ended with code {code}: {reason}")
        yield ready.removeprefix(_CLUSTER_READY).partition(". ")[0]
    finally:
        process.send_signal(signal.SIGTERM)
        stop_process(process, _CLUSTER_STOP_S)


def read_log(log: Path) -> list[dict[str, Any]]:
    """The entries of a JSON log until now."""
    entries = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # half a line, or a library's output
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def offset_port(address: str, offset: int) -> str:
    """The same host with another port: metrics and HTTP are beside the gRPC port."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + offset}"


def wait_until_healthy(address: str, timeout_s: float = 60.0, access: Access | None = None) -> None:
    """Returns when the server is SERVING. An address that can't be connected to fails at once."""
    request, access = health_pb2.HealthCheckRequest(), access or Access()
    with access.channel(address, ()) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        problem = _problem(stub, access, timeout_s)
        if problem is not None:
            raise NoServerError(f"no healthy server at {address}: {problem.reason}")
        watch = stub.Watch(request, timeout=timeout_s, wait_for_ready=True)
        try:
            for reply in watch:
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    watch.cancel()
                    return
        except grpc.RpcError as error:
            raise NoServerError(
                f"no healthy server at {address} within {timeout_s:g} s ({error.code().name})"
            ) from error


def _problem(
    stub: health_pb2_grpc.HealthStub, access: Access, timeout_s: float
) -> CallError | None:
    """Why the server can't be reached now."""
    try:
        stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    except grpc.RpcError as error:
        return diagnose(error.details() or "", access)
    return None


def _wait_until_ready(
    process: "subprocess.Popen[bytes]", log: Path, arguments: Sequence[str]
) -> dict[str, Any]:
    """The log's entry about addresses. A first start takes minutes; stdout shows its progress."""
    while (code := process.poll()) is None:
        ready = next((entry for entry in read_log(log) if "address" in entry), None)
        if ready is not None:
            return ready
        time.sleep(_POLL_S)
    command = " ".join(arguments[2:])
    raise NoServerError(f"`{command}` ended with code {code}: {last_line(log)}")


class MetricsSample(NamedTuple):
    at_s: float  # since 1970
    queue_depth: float
    running_sequences: float


def fetch_metrics(
    url: str | None, access: Access | None = None, context: ssl.SSLContext | None = None
) -> Samples:
    """Of a server that has metrics. The API key is sent where nobody else can read it."""
    assert url is not None, "the server has metrics"
    request = urllib.request.Request(url)
    is_private = access is not None and access.may_show_key(request.host.rpartition(":")[0])
    if access is not None and (request.type == "https" or is_private):
        for name, value in access.metadata:
            request.add_header(name, value)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context) as reply:
        return read_samples(reply.read().decode("utf-8", "replace"))


def derive_url(address: str, scheme: str = "http") -> str:
    """Empty where the port is unknown."""
    if not address.rpartition(":")[2].isdecimal():
        return ""
    return f"{scheme}://{offset_port(address, METRICS_OFFSET)}/metrics"


def watch_server(url: str | None, access: Access | None = None) -> Sampler[MetricsSample]:
    """Takes no samples while the server's metrics can't be read."""
    access = access or Access()
    authority = None if access.ca is None else access.ca.decode("ascii", "ignore")
    context = ssl.create_default_context(cadata=authority)
    return Sampler(lambda: _sample(url, access, context), SAMPLE_S)


def _sample(url: str | None, access: Access, context: ssl.SSLContext) -> MetricsSample | None:
    if not url:
        return None
    try:
        return as_sample(fetch_metrics(url, access, context), time.time())
    except (OSError, ValueError):
        return None


def as_sample(metrics: Samples, at_s: float) -> MetricsSample | None:
    """None if the page isn't a Quill server's."""
    if WAITING not in metrics or RUNNING not in metrics:
        return None
    return MetricsSample(at_s, metrics.value(WAITING), metrics.value(RUNNING))


def write_samples(path: Path, samples: Sequence[MetricsSample]) -> None:
    text = "".join(
        f"{each.at_s:.3f},{each.queue_depth:g},{each.running_sequences:g}\n" for each in samples
    )
    path.write_text(",".join(MetricsSample._fields) + "\n" + text, encoding="utf-8")
