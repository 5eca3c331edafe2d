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
    """One process with one bundle. Making it takes until the bundle is loaded.

    StartError: the bundle can't be served like this, or the process ended while it loaded.
    """

    ready: Ready

    def __init__(self, directory: Path, settings: Settings) -> None:
        self._control, control = socket.socketpair()
        try:
            with control:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", MODULE, str(control.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(control.fileno(),),
                )
            self._control.sendall(start_frame(directory, settings))
            self.ready = self._wait_until_ready(directory)
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """Soon: a step under way ends first."""
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

    def _wait_until_ready(self, directory: Path) -> Ready:
        with contextlib.suppress(ConnectionError, EOFError):
            message: Ready | Failed = LOADED.decode(receive(self._control))
            if isinstance(message, Failed):
                raise StartError(message.reason)
            return message
        how = in_words(self._process.wait())
        raise StartError(f"the engine's process ended while it loaded {directory}: {how}")


def in_words(code: int) -> str:
    return f"by signal {-code}" if code < 0 else f"with code {code}"
