"""The frontend's process: gRPC, HTTP and KServe, until a signal or the supervisor's end ends it.

Knows: the event loop, signals, the supervisor. Does not know: what a server consists of.
`python -m quill.server.serve.frontend_main CONTROL` gets a file descriptor: it brings the bundle's
directory and the settings.
"""

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from quill.export.errors import ExportError
from quill.server.api.grpc_server import allow_connections
from quill.server.errors import ServerError, StartError
from quill.server.machine.systemd import keep_notified, notify
from quill.server.process.loader import SupervisedLoader, Supervisor
from quill.server.process.messages import HEADER, Serving
from quill.server.serve.server import Server
from quill.server.settings import Settings
from quill.server.telemetry.call_record import set_up_logging

# How long a thread that works in Python may keep others waiting. While a body of 4 MiB was read,
# the median gap of 8 streams was 30 ms with Python's own 5 ms, and 20 with this; 14 without one.
TURN_S = 0.001
# A call of which gRPC hears late that it is over must not keep the process.
MAX_ENDING_S = 1.0


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor sends SIGTERM instead
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to reload
    sys.setswitchinterval(TURN_S)
    control = socket.socket(fileno=int(sys.argv[1]))
    directory, settings, sys.argv[0] = _read_start(control)
    set_up_logging(settings.log_format)
    allow_connections()
    try:
        asyncio.run(serve(directory, settings, control))
    except (ServerError, ExportError) as error:
        print(f"quill: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _read_start(control: socket.socket) -> tuple[Path, Settings, str]:
    with control.dup().makefile("rb") as stream:
        header = stream.read(HEADER.size)
        if len(header) < HEADER.size:
            os._exit(0)
        (length,) = HEADER.unpack(header)
        start: tuple[Path, Settings, str] = pickle.loads(stream.read(length))  # from our supervisor
        return start


async def serve(directory: Path, settings: Settings, control: socket.socket) -> None:
    """Until a signal comes, or the supervisor has gone."""
    loop = asyncio.get_running_loop()

    def stop_at_once() -> None:
        server.stop()
        server.stop()

    supervisor = Supervisor(control, lambda: _soon(loop, stop_at_once))
    server = Server(SupervisedLoader(directory, settings, supervisor), settings)
    health = server.health

    def stop() -> None:
        notify("STOPPING=1")
        server.stop()

    def is_well() -> bool:
        return not (health.has("hanging") or health.has("failing"))

    loop.add_signal_handler(signal.SIGTERM, stop)
    loop.add_signal_handler(signal.SIGHUP, server.reload_soon)
    telling = asyncio.gather(_tell_ready(server, supervisor), keep_notified(server.ready, is_well))
    try:
        await server.run()
        telling.cancel()
        await _let_calls_end()
        if server.has_failed:
            raise StartError("the engine's process ended and can't be started again")
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped
        loop.call_soon_threadsafe(call)


async def _tell_ready(server: Server, supervisor: Supervisor) -> None:
    await server.ready.wait()
    supervisor.tell(Serving(server.port, server.http_port, server.metrics_port))


async def _let_calls_end() -> None:
    """gRPC has a task for each call until it knows that it is over, which is a moment after the
    server stopped. Those that the end of the event loop cancels it tells of with a traceback."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=MAX_ENDING_S)


if __name__ == "__main__":
    main()
