"""A replica as Ray Serve knows it: made, asked how it is and how busy, and ended.

Knows: Ray Serve's contract with a deployment. Does not know: gRPC, limits, how a bundle is loaded.

Calls don't come this way, but for a detour: they go to Quill's own server.
"""

import sys
from pathlib import Path
from typing import Any, cast

import ray
from ray import serve

from quill.server.addresses import write_address
from quill.server.api.grpc_server import allow_connections
from quill.server.cluster.replica.bundle_source import local_bundle
from quill.server.cluster.replica.detour import Detour, detouring_methods
from quill.server.cluster.replica.membership import KeeperCalls, Membership
from quill.server.cluster.replica.options import ReplicaOptions
from quill.server.cluster.replica.own_server import Listening, put_in_place
from quill.server.cluster.replica.replica_server import Handlers, ReplicaServer
from quill.server.errors import ServerError
from quill.server.loading.instance import ModelInstance
from quill.server.loading.loader import Loader
from quill.server.telemetry.log_format import set_up_logging

LOOPBACK = "127.0.0.1"


class ReachedKeeper:
    """The keeper, as a deployment of the same application."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name).remote


class _ReplicaLoader:
    """Fetches the bundle each time: it may be at a URL."""

    def __init__(self, options: ReplicaOptions) -> None:
        self._options = options

    def load(self) -> ModelInstance:
        return Loader(_bundle(self._options), self._options.settings()).load()

    reload = load


class Replica:
    """One engine, in a process of its own."""

    async def __init__(self, options: ReplicaOptions, keeper: Any) -> None:  # type: ignore[misc]
        """Ray awaits it."""
        set_up_logging(options.log_format, sys.__stderr__)  # the other is Ray Serve's, and waits
        allow_connections()
        self._is_alone = options.one_machine
        self.detour = Detour(loopback_only=options.one_machine)
        name = serve.get_replica_context().replica_id.unique_id
        settings = options.settings()

        member = Membership(cast("KeeperCalls", ReachedKeeper(keeper)), name)
        self._server = ReplicaServer(_ReplicaLoader(options), settings, member, name)
        await self._server.load()
        put_in_place(self._listen)

    async def _listen(self, port: int, service: str, handlers: Handlers) -> Listening:
        """HAProxy comes by the loopback from this machine, and by its address from others."""
        hosts = {LOOPBACK} if self._is_alone else {LOOPBACK, ray.util.get_node_ip_address()}
        server = await self._server.listen(sorted(hosts), port, service, handlers)
        self.detour.open(write_address(LOOPBACK, self._server.port))
        return Listening(server, lambda grace_s: self._server.drain(server, grace_s))

    async def check_health(self) -> None:
        """Ray puts another in the place of one that raises."""
        if not self._server.health.is_serving:
            raise ServerError("step after step fails, or one hangs; the log has more")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {"requests": float(self._server.num_requests)}

    async def __del__(self) -> None:
        """Ray calls and awaits it when the last call has ended."""
        if hasattr(self, "_server"):
            await self.detour.close()
            await self._server.close()


for name, method in detouring_methods().items():
    setattr(Replica, name, method)


def _bundle(options: ReplicaOptions) -> Path:
    return local_bundle(options.bundle, options.manifest_sha256)
