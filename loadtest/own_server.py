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
from loadtest.processes import see_off

READY = "Serving at "
_METRICS = re.compile(r"metrics at (http://\S+)")
_STOP_S = 60.0


@dataclass(frozen=True)
class OwnServer:
    address: str
    metrics_url: str | None
    pid: int


@contextmanager
def own_server(log: Path, bundle: Path | None = None, *options: str) -> Iterator[OwnServer]:
    """Serves the bundle (the default one if None) on a free port. `log` gets what it logs."""
    given = [] if bundle is None else [str(bundle)]
    arguments = [sys.executable, "-m", "quill", "serve", *given, "--port", "0", *options]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1
        )
    try:
        address = _read_address(process, log, arguments)
        wait_until_healthy(address)
        found = _METRICS.search(log.read_text(encoding="utf-8", errors="replace"))
        yield OwnServer(address, found[1] if found else None, process.pid)
    finally:
        _stop(process)


def wait_until_healthy(address: str, timeout_s: float = 60.0) -> None:
    """Until the server there says SERVING."""
    request = health_pb2.HealthCheckRequest()
    with grpc.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            request, timeout=timeout_s, wait_for_ready=True
        )
        try:
            for reply in watch:
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    watch.cancel()
                    return
        except grpc.RpcError as error:
            raise NoServerError(
                f"no healthy server at {address} within {timeout_s:g} s "
                f"({error.code().name}). Start one there (quill serve), or leave out --address"
            ) from error


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
    see_off(process, _STOP_S)
    assert process.stdout is not None
    process.stdout.close()
