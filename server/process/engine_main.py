"""The engine's process: loads one bundle, and serves frontends.

Knows: the process that started it. Does not know: ports, API keys, text, steps.

`python -m quill.server.process.engine_main CONTROL` gets a file descriptor: CONTROL brings the
bundle and the settings, takes Ready or Failed, and then brings a connected socket for each
frontend. Its end is the signal to stop, so the process never outlives whoever started it.
"""

import contextlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
from pathlib import Path

import msgspec

from quill.export.errors import ExportError
from quill.server.errors import ServerError
from quill.server.loading.loader import load_engine
from quill.server.process.control import TURN_S, Failed, Ready, control_frame, read_start
from quill.server.process.engine_server import EngineServer
from quill.server.settings import Settings
from quill.server.telemetry.logs import set_up_logging

logger = logging.getLogger(__name__)


def main() -> None:
    """Signals are for the process that started this one: a terminal sends them to both."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(TURN_S)
    control = socket.socket(fileno=int(sys.argv[1]))
    directory, settings = read_start(control)
    set_up_logging(settings.log_format)
    frontends = _Frontends(control)
    server = _load(control, directory, settings)
    frontends.is_loading = False
    while (sock := frontends.connected.get()) is not None:
        server.accept(sock)
    server.stop()
    logging.shutdown()
    os._exit(0)  # a thread may be in a step that hangs


class _Frontends:
    """Receives a connected socket for each frontend, in a thread of its own."""

    def __init__(self, control: socket.socket) -> None:
        self.connected: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
        self.is_loading = True
        self._control = control
        threading.Thread(target=self._receive, name="control", daemon=True).start()

    def _receive(self) -> None:
        with contextlib.suppress(OSError):
            while descriptors := socket.recv_fds(self._control, 1, 1)[1]:
                self.connected.put(socket.socket(fileno=descriptors[0]))
        if self.is_loading:  # nobody wants the bundle any more
            os._exit(0)
        self.connected.put(None)


def _load(control: socket.socket, directory: Path, settings: Settings) -> EngineServer:
    try:
        loaded = load_engine(directory, settings)
    except (ServerError, ExportError) as error:
        control.sendall(control_frame(Failed(str(error))))
        os._exit(1)
    except BaseException as error:
        logger.exception("a bug in loading")
        control.sendall(control_frame(Failed(f"{type(error).__name__}: {error}")))
        os._exit(1)
    server = EngineServer(loaded)
    server.start()
    info = msgspec.Raw(msgspec.msgpack.encode(loaded.info))
    control.sendall(control_frame(Ready(os.getpid(), info)))
    return server


if __name__ == "__main__":
    main()
