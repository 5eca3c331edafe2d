"""The frontend's process: gRPC, HTTP and KServe, until a signal or the supervisor's end ends it.

Knows: the event loop, signals, the supervisor. Does not know: what a server consists of.
`python -m quill.server.serve.frontend_main CONTROL` gets a file descriptor: it brings the bundle's
directory and the settings.
"""

import asyncio
import gc
import signal
import socket
import sys
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from quill.export.errors import ExportError
from quill.server.api.grpc_server import allow_connections
from quill.server.errors import ServerError, StartError
from quill.server.machine.systemd import keep_notified, notify
from quill.server.process.control import TURN_S, Samples, Serving, read_start
from quill.server.process.loader import SupervisedLoader
from quill.server.process.shared_counts import SharedAdmission, SupervisedQuotas, merged_metrics
from quill.server.process.supervisor_link import SupervisorLink
from quill.server.serve.server import Server, Shared
from quill.server.settings import Settings
from quill.server.telemetry.logs import set_up_logging
from quill.server.telemetry.metrics import families_of, registry_of

# Python's own 700, 10, 10 cost 38% of the event loop's time under 600 streams: each call makes
# some hundred objects, and what was loaded at the start was gone through again and again.
GC_THRESHOLDS = (10_000, 20, 50)
# A call of which gRPC hears late that it is over must not keep the process.
MAX_ENDING_S = 1.0


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor sends SIGTERM instead
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to reload
    sys.setswitchinterval(TURN_S)
    control = socket.socket(fileno=int(sys.argv[1]))
    directory, settings, sys.argv[0], index = read_start(control)
    set_up_logging(settings.log_format)
    allow_connections()
    try:
        asyncio.run(serve(directory, settings, control, index))
    except (ServerError, ExportError) as error:
        print(f"quill: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


async def serve(directory: Path, settings: Settings, control: socket.socket, index: int) -> None:
    """Until a signal comes, or the supervisor has gone. `index`: which of the frontends it is."""
    loop = asyncio.get_running_loop()

    def stop_at_once() -> None:
        server.stop()
        server.stop()

    link = SupervisorLink(control, stop_at_once)
    loader = SupervisedLoader(directory, settings, link)
    server = Server(loader, settings, shared=_shared(link, settings, index))
    health = server.health

    link.on_newer = partial(_follow, server, loader, link)
    server.on_loaded = partial(_note_loaded, server, loader, link)
    link.on_report = lambda: server.begin(_report(server, link))

    def stop() -> None:
        notify("STOPPING=1")
        server.stop()

    def is_well() -> bool:
        return not (health.has("hanging") or health.has("failing"))

    loop.add_signal_handler(signal.SIGTERM, stop)
    loop.add_signal_handler(signal.SIGHUP, server.reload_soon)
    telling = asyncio.gather(
        _tell_ready(server, loader, link), keep_notified(server.ready, is_well)
    )
    try:
        await server.run()
        telling.cancel()
        await _let_calls_end()
        if server.has_failed:
            raise StartError("the engine's process ended and can't be started again")
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)


def _shared(link: SupervisorLink, settings: Settings, index: int) -> Shared | None:
    if settings.frontends == 1:
        return None

    async def registry() -> CollectorRegistry:
        return registry_of(await merged_metrics(link))

    return Shared(SupervisedQuotas(link), SharedAdmission(link), registry, index == 0)


async def _report(server: Server, link: SupervisorLink) -> None:
    link.tell(Samples(await asyncio.to_thread(families_of, server.metrics.registry)))


def _follow(server: Server, loader: SupervisedLoader, link: SupervisorLink) -> None:
    """To the engine of another frontend, if it is newer."""
    if 0 < loader.number < link.newest:
        server.reload_soon()


def _note_loaded(server: Server, loader: SupervisedLoader, link: SupervisorLink) -> None:
    """While it loaded, it couldn't follow."""
    if server.ready.is_set():
        _tell_serving(server, loader, link)
    _follow(server, loader, link)


def _tell_serving(server: Server, loader: SupervisedLoader, link: SupervisorLink) -> None:
    link.tell(Serving(loader.number, server.port, server.http_port, server.metrics_port))


async def _tell_ready(server: Server, loader: SupervisedLoader, link: SupervisorLink) -> None:
    await server.ready.wait()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    _tell_serving(server, loader, link)


async def _let_calls_end() -> None:
    """gRPC has a task for each call until it knows that it is over, which is a moment after the
    server stopped. Those that the end of the event loop cancels it tells of with a traceback."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=MAX_ENDING_S)


if __name__ == "__main__":
    main()
