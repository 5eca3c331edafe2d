"""A server of our own for as long as it is needed, when no address was given.

Knows: `quill serve` as a process, its log in JSON, the health service.
Does not know: what is asked of it.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quill.loadtest.environment.processes import wait_or_kill
from quill.loadtest.errors import NoServerError
from quill.server.client.access import Access
from quill.server.client.errors import Diagnosis, diagnose

HTTP_DISTANCE = 2
_LOOK_S = 0.05
_STOP_S = 60.0


@dataclass(frozen=True)
class OwnServer:
    address: str
    metrics_url: str | None
    http_address: str | None
    pid: int

    def address_for(self, protocol: str) -> str:
        """HTTP has a port of its own."""
        if protocol != "http":
            return self.address
        if self.http_address is None:
            raise NoServerError("the server has no HTTP: it was told --http-port off")
        return self.http_address


@contextmanager
def own_server(
    log: Path, bundle: Path | None = None, *options: str, access: Access | None = None
) -> Iterator[OwnServer]:
    """Serves the bundle (the default one if None) on a free port. `log` gets what it logs."""
    given = [] if bundle is None else [str(bundle)]
    arguments = [sys.executable, "-m", "quill", "serve", *given, "--port", "0", *options]
    arguments += ["--log-format", "json"]  # whatever was given: we read it
    with log.open("wb") as errors:
        # Out of reach of a terminal's Ctrl-C: whoever started us wants a server to the end.
        process = subprocess.Popen(arguments, stderr=errors, process_group=0)
    try:
        ready = _wait_until_ready(process, log, arguments)
        wait_until_healthy(ready["address"], access=access)
        http = ready.get("http")
        http_address = None if http is None else urlsplit(http).netloc
        yield OwnServer(ready["address"], ready.get("metrics"), http_address, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        wait_or_kill(process, _STOP_S)


def read_log(log: Path) -> list[dict[str, Any]]:
    """What a server that logs in JSON has said until now."""
    entries = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # half a line, or a library's word
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def derive_http(address: str) -> str:
    """A server's HTTP is at the port after the next, if nobody chose otherwise."""
    return _beside(address, HTTP_DISTANCE)


def derive_grpc(http_address: str) -> str:
    """The other way round."""
    return _beside(http_address, -HTTP_DISTANCE)


def _beside(address: str, distance: int) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + distance}"


def wait_until_healthy(address: str, timeout_s: float = 60.0, access: Access | None = None) -> None:
    """Until the server there says SERVING. A mix-up of TLS is told at once, where gRPC knows it."""
    request, access = health_pb2.HealthCheckRequest(), access or Access()
    with access.channel(address, ()) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        problem = _problem(stub, access, timeout_s)
        if problem is not None and problem.is_lasting:
            raise NoServerError(f"{address}: {problem.reason}")
        watch = stub.Watch(request, timeout=timeout_s, wait_for_ready=True)
        try:
            for reply in watch:
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    watch.cancel()
                    return
        except grpc.RpcError as error:
            advice = "Start one there (quill serve), or leave out --address"
            if problem is not None:
                advice = f"At first {problem.reason}"
            raise NoServerError(
                f"no healthy server at {address} within {timeout_s:g} s "
                f"({error.code().name}). {advice}"
            ) from error


def _problem(
    stub: health_pb2_grpc.HealthStub, access: Access, timeout_s: float
) -> Diagnosis | None:
    """Why nobody is reached there now."""
    try:
        stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    except grpc.RpcError as error:
        return diagnose(error.details() or "", access)
    return None


def _wait_until_ready(
    process: "subprocess.Popen[bytes]", log: Path, arguments: Sequence[str]
) -> dict[str, Any]:
    """What it says then. A first start takes minutes, and shows on stdout how far it is."""
    while (code := process.poll()) is None:
        ready = next((entry for entry in read_log(log) if "address" in entry), None)
        if ready is not None:
            return ready
        time.sleep(_LOOK_S)
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    command = " ".join(arguments[2:])
    raise NoServerError(f"`{command}` ended with code {code}: {' '.join(said) or 'no word'}")
