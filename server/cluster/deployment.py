"""What Ray runs: the replicas as a Ray Serve deployment, the coordinator and HAProxies as actors.

    import_path: quill.server.cluster.deployment:build

Knows: Ray's public API. Does not know: gRPC, quotas, how a bundle is loaded, HAProxy's commands.

Clients' calls don't pass through Ray: HAProxy sends them to the replicas' own gRPC servers. Ray
Serve starts, checks, scales and replaces replicas. The coordinator and one HAProxy for each machine
are named, detached actors: they outlive every replica, and end when there are no more replicas.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Any, cast

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quill.server.api.grpc_server import allow_connections
from quill.server.cluster.bundle_source import local_bundle
from quill.server.cluster.coordinator import Coordinator
from quill.server.cluster.membership import MAX_WAIT_S, Membership
from quill.server.cluster.plan import (
    COORDINATOR,
    DRAIN_S,
    NAMESPACE,
    REPLICA,
    REQUESTS,
    ReplicaArgs,
)
from quill.server.cluster.proxy import Proxy
from quill.server.cluster.replica_server import ReplicaServer
from quill.server.errors import ServerError, StartError
from quill.server.loading.instance import ModelInstance
from quill.server.loading.loader import Loader
from quill.server.telemetry.logs import set_up_logging

LOOPBACK = "127.0.0.1"
ALONE_S = 600.0  # without a replica; the first one may take minutes to load
POLL_S = 0.25

logger = logging.getLogger(__name__)


class _ReplicaLoader:
    """Fetches the bundle each time: it may be at a URL."""

    def __init__(self, args: ReplicaArgs) -> None:
        self._args = args

    def load(self) -> ModelInstance:
        bundle = local_bundle(self._args.bundle, self._args.manifest_sha256)
        return Loader(bundle, self._args.settings).load()

    reload = load


class Replica:
    """One engine, in a process of its own."""

    async def __init__(self, args: ReplicaArgs) -> None:  # type: ignore[misc]
        """Ray awaits it."""
        set_up_logging(args.settings.log_format, sys.__stderr__)  # sys.stderr is Ray Serve's
        allow_connections()
        self._args = args
        name = serve.get_replica_context().replica_id.unique_id
        coordinator = cast("Coordinator", CoordinatorHandle())
        member = Membership(coordinator, name, args.frontend, self._is_ready)
        self._server = ReplicaServer(_ReplicaLoader(args), args.settings, member)
        await start_proxy(args)
        await self._server.start(LOOPBACK if args.one_machine else ray.util.get_node_ip_address())

    def _is_ready(self) -> bool:
        return self._server.health.is_serving

    async def check_health(self) -> None:
        """Ray replaces a replica that raises."""
        if not self._is_ready():
            raise ServerError("step after step fails, or one hangs; the log has more")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {REQUESTS: float(len(self._server.dispatcher))}

    async def __del__(self) -> None:
        """Ray awaits it before it ends the process."""
        if hasattr(self, "_server"):
            await self._server.stop_gracefully(DRAIN_S, self._args.longest_answer_s)


def build(args: dict[str, Any]) -> Any:
    """The application. `args`: as serve.yaml has them."""
    return serve.deployment(Replica, name=REPLICA).bind(ReplicaArgs.read(args))


class CoordinatorActor(Coordinator):
    async def __init__(self) -> None:  # type: ignore[misc]
        super().__init__()
        self._ending = asyncio.ensure_future(_end_alone(self._is_alone))

    async def _is_alone(self) -> bool:
        return not self.replicas


class ProxyActor:
    """HAProxy on one machine, with the coordinator's endpoint pool."""

    async def __init__(self, frontend: str, longest_answer_s: float) -> None:  # type: ignore[misc]
        allow_connections()
        self._frontend = frontend
        self._coordinator = CoordinatorHandle()
        self._proxy = Proxy(frontend, longest_answer_s)
        await self._proxy.start()
        self._ending = asyncio.ensure_future(_end_alone(self._update))

    async def ready(self) -> None:
        """After `__init__`."""

    async def _update(self) -> bool:
        """Whether there is no replica. Then HAProxy keeps its servers: a new coordinator gets to
        know the replicas by their next heartbeats."""
        if not self._proxy.is_running:
            await self._proxy.start()
        endpoints = await self._coordinator.endpoints(self._frontend)
        if endpoints:
            await self._proxy.update(endpoints)
        return not endpoints


async def _end_alone(is_alone: Callable[[], Awaitable[bool]]) -> None:
    """Ends this actor when it has been without replicas for a while."""
    alone_s = 0.0
    while alone_s < ALONE_S:
        await asyncio.sleep(POLL_S)
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                alone_s = alone_s + POLL_S if await is_alone() else 0.0
        except Exception as error:  # the coordinator, or HAProxy, starts again
            logger.warning("no endpoints at this moment: %r", error)
    ray.kill(ray.get_runtime_context().current_actor)


class CoordinatorHandle:
    """The coordinator's methods, on the actor that runs now; the first call starts the actor."""

    def __init__(self) -> None:
        self._actor: Any = None

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any) -> Any:
            self._actor = self._actor or _start(CoordinatorActor, COORDINATOR)
            try:
                return await getattr(self._actor, name).remote(*args)
            except RayActorError:
                self._actor = None
                raise

        return call


async def start_proxy(args: ReplicaArgs) -> None:
    """On this machine, unless it has one."""
    node = ray.get_runtime_context().get_node_id()
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    name = f"proxy {node} {args.frontend}"
    actor = _start(ProxyActor, name, args.frontend, args.longest_answer_s, scheduling_strategy=here)
    try:
        await actor.ready.remote()
    except RayActorError as error:
        raise StartError(str(error)) from error


def _start(kind: type, name: str, *args: Any, **options: Any) -> Any:
    return (
        ray.remote(kind)
        .options(
            name=name,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            **options,
        )
        .remote(*args)
    )
