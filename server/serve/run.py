"""`quill serve`: from the command's arguments to a server that runs until a signal ends it.

Knows: settings, which bundle, the event loop. Does not know: what a server consists of.
"""

import argparse
import asyncio
import signal
import sys

from quill.server.api.grpc_server import allow_connections
from quill.server.errors import StartError
from quill.server.machine.systemd import keep_notified, notify
from quill.server.process.loader import ProcessLoader
from quill.server.serve.default_model import prepared_bundle
from quill.server.serve.server import Server
from quill.server.settings import Settings, check_exposure, read_settings
from quill.server.telemetry.call_record import set_up_logging

# How long a thread that works in Python may keep others waiting. While a body of 4 MiB was read,
# the median gap of 8 streams was 30 ms with Python's own 5 ms, and 20 with this; 14 without one.
TURN_S = 0.001


def run(args: argparse.Namespace) -> None:
    sys.setswitchinterval(TURN_S)
    settings = read_settings(args)
    set_up_logging(settings.log_format)
    check_exposure(settings)
    allow_connections()
    directory = args.bundle or prepared_bundle(settings.device, settings.precision)
    asyncio.run(serve(ProcessLoader(directory, settings), settings))


# A call of which gRPC hears late that it is over must not keep the process.
MAX_ENDING_S = 1.0


async def serve(loader: ProcessLoader, settings: Settings) -> None:
    """Until a signal comes."""
    server = Server(loader, settings)
    loop, health = asyncio.get_running_loop(), server.health

    def stop() -> None:
        notify("STOPPING=1")
        server.stop()

    def is_well() -> bool:
        return not (health.has("hanging") or health.has("failing"))

    handlers = {
        signal.SIGTERM: stop,
        signal.SIGINT: stop,
        signal.SIGHUP: server.reload_soon,
    }
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    notifying = asyncio.ensure_future(keep_notified(server.ready, is_well))
    try:
        await server.run()
        notifying.cancel()
        await _let_calls_end()
        if server.has_failed:
            raise StartError("the engine's process ended and can't be started again")
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


async def _let_calls_end() -> None:
    """gRPC has a task for each call until it knows that it is over, which is a moment after the
    server stopped. Those that the end of the event loop cancels it tells of with a traceback."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=MAX_ENDING_S)
