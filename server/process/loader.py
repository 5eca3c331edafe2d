"""Loads bundles into engine processes, for a server in this process.

Knows: engine processes, what frontends need of a bundle. Does not know: ports, signals, calls.
"""

from pathlib import Path

from quill.export.bundle.manifest import read_manifest
from quill.server.errors import StartError
from quill.server.loading.description import describe, manifest_sha256
from quill.server.loading.instance import ModelInstance
from quill.server.process.engine_client import EngineClient
from quill.server.process.engine_process import EngineProcess
from quill.server.settings import Settings


class ProcessLoader:
    """Each bundle gets a process of its own: one that crashes while it loads harms nobody."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        self._directory = directory
        self._settings = settings

    def load(self) -> ModelInstance:
        process = EngineProcess(self._directory, self._settings)
        try:
            return self._instance(process)
        except BaseException:
            process.stop()
            raise

    reload = load

    def _instance(self, process: EngineProcess) -> ModelInstance:
        ready = process.ready
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
        sock = process.connect()
        return ModelInstance(served, lambda events: EngineClient(sock, process, events))
