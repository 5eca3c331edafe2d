"""Quill's own server inside a replica: loaded first, then listening where Ray wants it to.

Knows: the order of starting and stopping in a replica. Does not know: Ray.

It is the server of `quill serve`, so calls, keys, errors, deadlines, health and reflection are the
same. What is different: who chooses the port, who holds callers to their limits, and that an
administrator's reload goes to all replicas.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from quill.export.precisions import Family
from quill.server.addresses import write_address
from quill.server.api.grpc_server import bind
from quill.server.cluster.replica.labelled import labelled
from quill.server.cluster.replica.membership import Membership
from quill.server.errors import StartError, UnavailableError
from quill.server.loading.loader import ModelLoader
from quill.server.protocol.served_model import ServedModel
from quill.server.serve.server import QUIET_S, Server
from quill.server.service.service import Service
from quill.server.settings import Settings

logger = logging.getLogger(__name__)

LAST_S = 1.0  # for statuses that are on their way
NUM_METRICS_PORTS = 100  # replicas of a machine take the first that is free

Handlers = dict[str, Any]  # grpc.RpcMethodHandler, generic in its stub alone


class ReplicaServer(Server):
    """From loading to the end of the process. Belongs to one event loop."""

    def __init__(
        self, loader: ModelLoader, settings: Settings, member: Membership, replica: str
    ) -> None:
        super().__init__(loader, settings, member)
        self._member = member
        self._replica = replica
        self._tasks: list[asyncio.Task[None]] = []

    async def load(self) -> None:
        """Nobody is sent here before it is done."""
        await self.health.begin()
        await self._open()
        self._tasks = [
            asyncio.ensure_future(self.reloader.watch()),
            asyncio.ensure_future(self._member.beat(self.reload)),
        ]

    async def listen(
        self, hosts: Sequence[str], port: int, service: str, handlers: Handlers
    ) -> grpc.aio.Server:
        """`service`, with its `handlers`, is offered beside ours, and to callers without a key."""
        share_cache = self._settings.share_prefix_cache
        own = Service(self.dispatcher, self.reloader, self.calls, share_cache)
        server = self._make_server(own, [f"/{service}/"])
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        server.add_registered_method_handlers(service, handlers)
        for host in hosts:
            self.port = bind(server, replace(self._settings, host=host, port=port))
        await server.start()
        self.listening.set()
        return server

    async def drain(self, server: grpc.aio.Server, grace_s: float) -> None:
        """Lets nobody in, and ends when the last call has, or after so long.

        gRPC by itself would wait for streams that never end, as those who watch health have.
        """
        await self.health.note("stopping", True)
        ending = asyncio.ensure_future(server.stop(grace_s))
        await self.calls.wait_until_quiet(QUIET_S, grace_s)
        await server.stop(LAST_S)
        await ending

    @property
    def num_requests(self) -> int:
        """Running or waiting."""
        return len(self.dispatcher)

    async def close(self) -> None:
        """After the last call, when nobody is let in any more."""
        for task in self._tasks:
            task.cancel()
        await self._member.leave()
        self.dispatcher.close()
        await self.reloader.close()
        self._stop_metrics()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        logger.info("replica %s has stopped", self._replica)

    async def _asked_to_reload(self) -> ServedModel:
        await self._member.reload_all()
        if self.reloader.instance is None:
            raise UnavailableError("this replica is stopping; the others have the new bundle")
        return self.reloader.instance.served

    def _open_metrics(self) -> None:
        if not self._settings.metrics_ports:
            return
        first = self._settings.metrics_ports[0]
        for port in range(first, first + NUM_METRICS_PORTS):
            try:
                self._serve_metrics(port)
            except StartError:
                continue
            return
        logger.error("no port from %d to %d is free: there are no metrics", first, port)

    def _shown_registry(self) -> CollectorRegistry:
        return labelled(self.metrics.registry, replica=self._replica)

    def _say_ready(self, family: Family) -> None:
        metrics = None
        if self.metrics_port is not None:
            metrics = write_address(self._settings.host, self.metrics_port)
        fields = {"replica": self._replica, "metrics": metrics}
        logger.info("replica %s has loaded", self._replica, extra={"fields": fields})
