"""Starts the engine's process, and ends it.

Knows: subprocesses, the sockets that an engine gets. Does not know: the event loop, ONNX.
Engines have no address: whoever may use one is given a connected socket.
"""

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

from quill.server.errors import StartError
from quill.server.frames import receive
from quill.server.process.control import LOADED, Failed, Ready, start_frame
from quill.server.settings import Settings

MODULE = "quill.server.process.engine_main"


class EngineProcess:
    """One process with one bundle."""

    ready: Ready  # after `wait_until_ready`

    def __init__(self, directory: Path, settings: Settings) -> None:
        self._directory = directory
        self._control, control = socket.socketpair()
        self._control.sendall(start_frame(directory, settings))
        try:
            with control:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", MODULE, str(control.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(control.fileno(),),
                    start_new_session=True,  # a terminal's Ctrl-C comes before it can be ignored
                )
        except BaseException:
            self._control.close()
            raise

    def wait_until_ready(self) -> None:
        """StartError: the bundle can't be served like this, or the process ended meanwhile."""
        with contextlib.suppress(OSError, EOFError):
            message: Ready | Failed = LOADED.decode(receive(self._control))
            if isinstance(message, Failed):
                raise StartError(message.reason)
            self.ready = message
            return
        how = self.wait()
        raise StartError(f"the engine's process ended while it loaded {self._directory}: {how}")

    def stop(self) -> None:
        """Soon: a step under way ends first. To close a socket doesn't wake who reads from it."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()

    def connect(self) -> socket.socket:
        """A connection for a frontend. OSError: the process has ended."""
        own, other = socket.socketpair()
        with other:
            try:
                socket.send_fds(self._control, [b"+"], [other.fileno()])
            except OSError:
                own.close()
                raise
        return own

    def join(self, timeout_s: float) -> bool:
        """Waits for the end after `stop`; what doesn't end in time is killed. False: it was."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        return True

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> str:
        """How it ended, in words, once it has."""
        return in_words(self._process.wait())


def in_words(code: int) -> str:
    return f"by signal {-code}" if code < 0 else f"with code {code}"
