"""Starts the engine's process, and ends it.

Knows: subprocesses, the socket at which the engine serves. Does not know: the event loop, ONNX.
The socket is in a directory that only this user can enter.
"""

import contextlib
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from quill.server.errors import StartError
from quill.server.process.messages import HEADER, LOADED, Failed, Frames, Ready
from quill.server.settings import Settings

MODULE = "quill.server.process.engine_main"
MAX_BACKLOG = 16
RECEIVE_BYTES = 2**16
MAX_DYING_S = 0.2  # its connections close before its parent is told


class EngineProcess:
    """One process with one bundle. Making it takes until the bundle is loaded.

    StartError: the bundle can't be served like this, or the process ended while it loaded.
    """

    ready: Ready

    def __init__(self, directory: Path, settings: Settings) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="quill-"))
        self.path = str(self._folder / "engine")
        self._control, control = socket.socketpair()
        listener = socket.socket(socket.AF_UNIX)
        try:
            with control, listener:
                listener.bind(self.path)
                listener.listen(MAX_BACKLOG)
                fds = control.fileno(), listener.fileno()
                self._process = subprocess.Popen(
                    [sys.executable, "-m", MODULE, *map(str, fds)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=fds,
                )
            start = pickle.dumps((directory, settings))
            self._control.sendall(HEADER.pack(len(start)) + start)
            self.ready = self._wait_until_ready(directory)
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(self.path)
        return sock

    def stop(self) -> None:
        """Soon: a step under way ends first."""
        self._control.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def join(self, timeout_s: float) -> bool:
        """Waits for the end after `stop`; what doesn't end in time is killed. False: it was."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        return True

    def how_it_ended(self) -> str:
        """After its connection was lost."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(MAX_DYING_S)
        code = self._process.poll()
        return "it hangs" if code is None else _in_words(code)

    def _wait_until_ready(self, directory: Path) -> Ready:
        frames = Frames()
        with contextlib.suppress(ConnectionError):
            while data := self._control.recv(RECEIVE_BYTES):
                for body in frames.feed(data):
                    message: Ready | Failed = LOADED.decode(body)
                    if isinstance(message, Failed):
                        raise StartError(message.reason)
                    return message
        how = _in_words(self._process.wait())
        raise StartError(f"the engine's process ended while it loaded {directory}: {how}")


def _in_words(code: int) -> str:
    return f"by signal {-code}" if code < 0 else f"with code {code}"
