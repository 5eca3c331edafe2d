"""Quill's server inside a replica: it loads the bundle first, and listens afterwards.

Knows: the order of starting and stopping in a replica. Does not know: Ray, HAProxy.

This is the server of `quill serve`: calls, keys, errors, deadlines, health and reflection are the
same. The replica's ports are chosen from a range, quotas are the cluster's, an administrator's
reload goes to all replicas, and metrics have a label with the replica's name.
"""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace

import grpc
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from quill.export.precisions import Family
from quill.server.addresses import open_first, write_address
from quill.server.api.grpc_server import bind
from quill.server.cluster.membership import Membership
from quill.server.cluster.plan import REPLICA_PORTS
from quill.server.errors import StartError, UnavailableError
from quill.server.frontend.served_model import ServedModel
from quill.server.loading.instance import ModelLoader
from quill.server.serve.server import QUIET_S, Server
from quill.server.settings import Settings

logger = logging.getLogger(__name__)

NUM_METRICS_PORTS = 100  # replicas of one machine take the first free port
STATUS_S = 1.0  # for the last statuses to be sent


class ReplicaServer(Server):
    """From loading to the end of the process. Belongs to one event loop."""

    def __init__(self, loader: ModelLoader, settings: Settings, member: Membership) -> None:
        super().__init__(loader, settings, member)
        self._member = member
        self._tasks: list[asyncio.Task[None]] = []
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str) -> None:
        """Loads, listens at `host`, and only then joins the cluster."""
        if await self._load():
            await self._announce()
        server = self._server = self._make_server()
        settings = replace(self._settings, host=host)
        self.port = open_first(
            REPLICA_PORTS, lambda port: bind(server, replace(settings, port=port)), "the replica"
        )
        await server.start()
        self.listening.set()
        self._tasks = [
            asyncio.ensure_future(self.reloader.watch()),
            asyncio.ensure_future(self._member.join(write_address(host, self.port), self.reload)),
        ]

    async def stop_gracefully(self, drain_s: float, timeout_s: float) -> None:
        """Takes calls for `drain_s` more, until every HAProxy has drained this replica; then waits
        `timeout_s` at most for the last call.

        gRPC alone would wait for streams that never end, such as health's Watch.
        """
        await self._member.drain()
        await asyncio.sleep(drain_s)
        self.health.note("stopping", True)
        if self._server is not None:
            stopping = asyncio.ensure_future(self._server.stop(timeout_s))
            await self.calls.wait_until_quiet(QUIET_S, timeout_s)
            await self._server.stop(STATUS_S)
            await stopping
        for task in self._tasks:
            task.cancel()
        await self._member.leave()
        self.dispatcher.close()
        await self.reloader.close()
        await self._close_metrics()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        logger.info("replica %s has stopped", self._member.replica)

    async def _asked_to_reload(self) -> ServedModel:
        await self._member.reload_all()
        if self.reloader.instance is None:
            raise UnavailableError("this replica is stopping; the others have the new bundle")
        return self.reloader.instance.served

    async def _open_metrics(self) -> None:
        for first in self._settings.metrics_ports[:1]:
            ports = range(first, first + NUM_METRICS_PORTS)
            try:
                await self._serve_metrics(ports)
            except StartError:
                logger.error("no port from %d to %d is free: no metrics", first, ports[-1])

    async def _shown_registry(self) -> CollectorRegistry:
        return labeled(self.metrics.registry, replica=self._member.replica)

    def _log_ready(self, family: Family) -> None:
        metrics = None
        if self.metrics_port is not None:
            metrics = write_address(self._settings.host, self.metrics_port)
        fields = {"replica": self._member.replica, "metrics": metrics}
        logger.info("replica %s has loaded", self._member.replica, extra={"fields": fields})


class _Labeled(Collector):
    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        self._registry = registry
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            labeled = Metric(metric.name, metric.documentation, metric.type, metric.unit)
            labeled.samples = [
                sample._replace(labels={**sample.labels, **self._labels})
                for sample in metric.samples
            ]
            yield labeled


def labeled(registry: CollectorRegistry, **labels: str) -> CollectorRegistry:
    """A view of `registry` whose samples have these labels, too."""
    view = CollectorRegistry()
    view.register(_Labeled(registry, labels))
    return view
