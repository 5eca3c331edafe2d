"""Loads bundles for a frontend: the supervisor starts the engines, and the frontend uses them.

Knows: the supervisor's engines, what frontends need of a bundle. Does not know: ports, calls.
"""

from pathlib import Path

import msgspec

from quill.export.errors import BundleError
from quill.server.loading.description import EngineInfo, describe
from quill.server.loading.instance import ModelInstance
from quill.server.process.control import Release
from quill.server.process.engine_client import EngineClient
from quill.server.process.supervisor_link import ConnectedEngine, SupervisorLink
from quill.server.settings import Settings


class SupervisedLoader:
    """Each bundle gets a process of its own: one that crashes while it loads harms nobody."""

    def __init__(self, directory: Path, settings: Settings, link: SupervisorLink) -> None:
        self._directory = directory
        self._settings = settings
        self._link = link
        self.number = 0  # of the newest engine; 0: there is none yet

    def load(self) -> ModelInstance:
        try:
            return self._load()
        except BundleError:  # a file has changed since the engine was loaded: another one loads it
            return self._load()

    reload = load

    def _load(self) -> ModelInstance:
        connected = self._link.load(self.number)
        self.number = connected.engine.number
        lease = Lease(connected, self._link)
        try:
            info = msgspec.msgpack.decode(connected.engine.ready.info, type=EngineInfo)
            served = describe(self._directory, info, self._settings)
        except BaseException:
            connected.socket.close()
            lease.stop()
            raise
        return ModelInstance(served, lambda events: EngineClient(connected.socket, lease, events))


class Lease:
    """The use of one engine."""

    def __init__(self, connected: ConnectedEngine, link: SupervisorLink) -> None:
        self._engine = connected.engine
        self._link = link

    @property
    def pid(self) -> int:
        return self._engine.ready.pid

    def stop(self) -> None:
        self._link.tell_soon(Release(self._engine.number))
