"""Loads bundles for a frontend: the supervisor starts the engines, and the frontend connects.

Knows: the supervisor's messages, what frontends need of a bundle. Does not know: ports, calls.
"""

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from quill.export.bundle.manifest import read_manifest
from quill.server.errors import StartError
from quill.server.loading.description import describe, manifest_sha256
from quill.server.loading.instance import ModelInstance
from quill.server.process.engine_client import EngineClient
from quill.server.process.messages import (
    FROM_SUPERVISOR,
    Engine,
    Failed,
    Frames,
    FromSupervisor,
    Load,
    Release,
    ToSupervisor,
    frame,
)
from quill.server.settings import Settings

RECEIVE_BYTES = 2**16


class Supervisor:
    """The supervisor, as a frontend sees it. `on_gone`: it has ended, and so must this process."""

    def __init__(self, control: socket.socket, on_gone: Callable[[], None]) -> None:
        self._control = control
        self._on_gone = on_gone
        self._answers: queue.SimpleQueue[FromSupervisor] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="supervisor", daemon=True).start()

    def tell(self, message: ToSupervisor) -> None:
        with contextlib.suppress(OSError):  # it has gone: `on_gone` is called
            self._control.sendall(frame(message))

    def load(self, after: int) -> Engine:
        """Waits until an engine is there that was started after this one."""
        self.tell(Load(after))
        answer = self._answers.get()
        if isinstance(answer, Failed):
            raise StartError(answer.reason)
        return answer

    def _receive(self) -> None:
        frames = Frames()
        with contextlib.suppress(OSError):  # it may die with a message of ours unread
            while data := self._control.recv(RECEIVE_BYTES):
                for body in frames.feed(data):
                    self._answers.put(FROM_SUPERVISOR.decode(body))
        self._answers.put(Failed("the supervisor's process ended"))
        self._on_gone()


class SupervisedLoader:
    """Each bundle gets a process of its own: one that crashes while it loads harms nobody."""

    def __init__(self, directory: Path, settings: Settings, supervisor: Supervisor) -> None:
        self._directory = directory
        self._settings = settings
        self._supervisor = supervisor
        self._number = 0  # of the newest engine

    def load(self) -> ModelInstance:
        engine = self._supervisor.load(self._number)
        self._number = engine.number
        lease = Lease(engine, self._supervisor)
        try:
            return self._instance(engine, lease)
        except BaseException:
            lease.stop()
            raise

    reload = load

    def _instance(self, engine: Engine, lease: "Lease") -> ModelInstance:
        ready = engine.ready
        manifest = read_manifest(self._directory)
        if manifest_sha256(self._directory) != ready.manifest_sha256:
            raise StartError(f"{self._directory} changed while it was loaded. Try again")
        served = describe(
            self._directory,
            manifest,
            ready.precision,
            ready.limits,
            ready.runtime_version,
            ready.takes_constraints,
            self._settings,
        )
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(os.fspath(engine.path))
        return ModelInstance(served, lambda events: EngineClient(sock, lease, events))


class Lease:
    """The use of one engine."""

    def __init__(self, engine: Engine, supervisor: Supervisor) -> None:
        self._engine = engine
        self._supervisor = supervisor

    @property
    def pid(self) -> int:
        return self._engine.ready.pid

    def stop(self) -> None:
        self._supervisor.tell(Release(self._engine.number))
