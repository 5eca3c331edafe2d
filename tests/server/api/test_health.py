"""gRPC's health service: its statuses, and watchers that do harm."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quill.server.api import health
from tests.server.bad_bytes import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    frame,
    headers,
)
from tests.server.running import NOT_SERVING, SERVICE, SERVING, Running, health_of, running_server
from tests.server.scripted_session import TIMEOUT_S

UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
WATCH = "/grpc.health.v1.Health/Watch"
PATIENCE_S = 30  # gRPC ends a connection whose client acknowledges no ping, after 60 s
NO_WINDOW = frame(SETTINGS, 0, 0, b"\0\4" + bytes(4))


@contextmanager
def unread_watch(running: Running) -> Iterator[None]:
    """Of a client that lets the server send no data at all."""
    watch = frame(HEADERS, END_HEADERS, 1, headers(WATCH)) + frame(DATA, END_STREAM, 1, bytes(5))
    with socket.create_connection(("127.0.0.1", running.server.port), TIMEOUT_S) as client:
        client.sendall(PREFACE + NO_WINDOW + watch)
        while b"application/grpc" not in client.recv(4096):  # the answer's headers
            pass
        yield


@contextmanager
def health_stub(running: Running) -> Iterator[health_pb2_grpc.HealthStub]:
    with grpc.insecure_channel(running.address) as channel:
        yield health_pb2_grpc.HealthStub(channel)


def test_watcher_that_never_reads_delays_neither_the_start_nor_the_stop() -> None:
    with running_server(wait=False) as running, unread_watch(running):
        running.loading.set()
        running.call(asyncio.wait_for(running.server.ready.wait(), PATIENCE_S))
        assert health_of(running) == SERVING
        running.stop()
        running._thread.join(PATIENCE_S)
        assert not running._thread.is_alive()


def test_watcher_that_never_reads_is_ended() -> None:
    with running_server(write_timeout_s=0.1) as running, unread_watch(running):
        running.wait_for(lambda: not running.server.health._num_watchers)


def test_watcher_gets_each_status_once() -> None:
    with running_server(wait=False) as running, health_stub(running) as stub:
        statuses = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=TIMEOUT_S)
        assert next(statuses).status == NOT_SERVING
        running.server.health.note_soon("hanging", True)
        running.loading.set()
        running.wait_for(lambda: not running.server.health.has("loading"))
        running.server.health.note_soon("hanging", False)
        assert next(statuses).status == SERVING


def test_unknown_service_is_not_found_and_its_watcher_waits() -> None:
    request = health_pb2.HealthCheckRequest(service="none.such")
    with running_server() as running, health_stub(running) as stub:
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(request, timeout=TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert next(stub.Watch(request, timeout=TIMEOUT_S)).status == UNKNOWN


@pytest.mark.parametrize("limit", ["MAX_WATCHERS", "MAX_WATCHERS_OF_HOST"])
def test_so_many_may_watch_at_once(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(health, limit, 1)
    request = health_pb2.HealthCheckRequest()
    with running_server() as running, health_stub(running) as stub:
        first = stub.Watch(request, timeout=TIMEOUT_S)
        assert next(first).status == SERVING
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.Watch(request, timeout=TIMEOUT_S))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert health_of(running) == SERVING
        first.cancel()
        running.wait_for(lambda: not running.server.health._num_watchers)
        assert next(stub.Watch(request, timeout=TIMEOUT_S)).status == SERVING
