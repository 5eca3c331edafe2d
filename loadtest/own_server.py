"""A server of our own for as long as it is needed, when no address was given.

Knows: `quill serve` as a process, what it prints, the health service.
Does not know: what is asked of it.
"""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loadtest.errors import NoServerError
from loadtest.processes import wait_or_kill
from server.access import Access
from server.unreachable import Diagnosis, diagnose

READY = "Serving at "
_METRICS = re.compile(r"metrics at (https?://\S+)")
_STOP_S = 60.0


@dataclass(frozen=True)
class OwnServer:
    address: str
    metrics_url: str | None
    pid: int


@contextmanager
def own_server(
    log: Path, bundle: Path | None = None, *options: str, access: Access | None = None
) -> Iterator[OwnServer]:
    """Serves the bundle (the default one if None) on a free port. `log` gets what it logs."""
    given = [] if bundle is None else [str(bundle)]
    arguments = [sys.executable, "-m", "quill", "serve", *given, "--port", "0", *options]
    arguments += ["--log-format", "text"]  # whatever was given: the words below are looked for
    with log.open("wb") as errors:
        process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1
        )
    try:
        address = _read_address(process, log, arguments)
        wait_until_healthy(address, access=access)
        found = _METRICS.search(log.read_text(encoding="utf-8", errors="replace"))
        yield OwnServer(address, found[1] if found else None, process.pid)
    finally:
        _stop(process)


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


def _read_address(process: "subprocess.Popen[str]", log: Path, arguments: Sequence[str]) -> str:
    """Shows what the server says while it gets ready: the first start takes minutes."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(READY):
            return line.removeprefix(READY).partition(". ")[0]
        print(line, end="", flush=True)
    code = process.wait()
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    command = " ".join(arguments[2:])
    raise NoServerError(f"`{command}` ended with code {code}: {' '.join(said) or 'no word'}")


def _stop(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGTERM)
    wait_or_kill(process, _STOP_S)
    assert process.stdout is not None
    process.stdout.close()
