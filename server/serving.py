"""`quill serve`: a server from the opening of its port to its end in good order.

Knows: the order of starting and stopping, signals, ports. Does not know: what calls do.
"""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc as pb_grpc
from server.admission import Admission
from server.default_model import default_bundle
from server.desk import Desk
from server.engine_thread import EngineThread
from server.errors import StartError
from server.exposure import check_exposure
from server.gate import Gate
from server.keyring import Keyring
from server.metrics import Metrics
from server.metrics_http import serve_metrics
from server.record import Record, set_up_logging
from server.servicer import TextGeneration
from server.settings import Settings, read_settings
from server.starting import Load, prepare
from server.tls import server_credentials
from server.unreadable import RefuseUnreadable

logger = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["TextGeneration"].full_name


def run(args: argparse.Namespace) -> None:
    set_up_logging(args.log_format)
    settings = read_settings(args)
    check_exposure(settings)
    directory = args.bundle or default_bundle()
    load = prepare(directory, settings)
    asyncio.run(serve(load, settings))


async def serve(load: Load, settings: Settings) -> None:
    """Until a signal comes."""
    server = Server(load, settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    try:
        await server.run()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


class Server:
    """One server, from the opening of its port to its end. Belongs to one event loop."""

    def __init__(self, load: Load, settings: Settings) -> None:
        self._load = load
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self.metrics = Metrics()
        self.desk = Desk(self._loop, Admission(settings.max_waiting), self.metrics.observe)
        self.servicer = TextGeneration(
            self.desk, self._report, settings.write_timeout_s, settings.share_cache
        )
        self.port = 0
        self.metrics_port: int | None = None
        self.listening = asyncio.Event()
        self.ready = asyncio.Event()
        self.closing = asyncio.Event()
        self._stopping = asyncio.Event()
        self._stopping_at_once = asyncio.Event()
        self._health = health.aio.HealthServicer()
        self._keyring = None if settings.api_keys is None else Keyring(settings.api_keys)
        self._thread: EngineThread | None = None

    def stop(self) -> None:
        """The first time in good order, the second time at once."""
        if self._stopping.is_set():
            self._stopping_at_once.set()
        self._stopping.set()

    async def run(self) -> None:
        server = await self._listen()
        try:
            if await self._open():
                await self._stopping.wait()
                await self._drain()
        finally:
            await self._close(server)

    async def _listen(self) -> grpc.aio.Server:
        options = [
            ("grpc.max_receive_message_length", self._settings.max_message_bytes),
            ("grpc.so_reuseport", 0),  # a second server on the same port is an error
        ]
        server = grpc.aio.server(interceptors=self._interceptors(), options=options)
        pb_grpc.add_TextGenerationServicer_to_server(self.servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        await self._set_health(False)
        self.port = _bind(server, self._settings)
        await server.start()
        self.listening.set()
        return server

    def _interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        interceptors: list[grpc.aio.ServerInterceptor] = [RefuseUnreadable(SERVICE)]
        if self._keyring is not None:
            gate = Gate(self._keyring, self._settings.open_reflection, self._report)
            interceptors.insert(0, gate)
        return interceptors

    async def _open(self) -> bool:
        """Loads the model while health says NOT_SERVING. False: stopped before it was ready."""
        loading = asyncio.ensure_future(asyncio.to_thread(self._load))
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not loading.done():
            return False
        loaded = loading.result()
        self._thread = EngineThread(loaded.engine, self.desk.publish, self._on_health)
        self._thread.start()
        self.metrics.set_slots(loaded.served.max_rows)
        self.servicer.served = loaded.served
        self.desk.open(self._thread)
        self._open_metrics()
        await self._set_health(True)
        self._say_ready()
        self.ready.set()
        return True

    def _open_metrics(self) -> None:
        port = self._settings.metrics_port
        self._stop_metrics: Callable[[], None] = lambda: None
        if port is not None:
            keyring = None if self._settings.open_metrics else self._keyring
            taken, stop = serve_metrics(
                self.metrics.registry, self._settings.host, port, self._settings.tls, keyring
            )
            self.metrics_port, self._stop_metrics = taken, stop

    def _say_ready(self) -> None:
        address = f"{self._settings.host}:{self.port}"
        if self.metrics_port is not None:
            scheme = "http" if self._settings.tls is None else "https"
            logger.info(
                "metrics at %s://%s:%d/metrics", scheme, self._settings.host, self.metrics_port
            )
        print(f"Serving at {address}. Now type:", flush=True)
        tls = "" if self._settings.tls is None else " --ca CA.pem"
        line = f'{_front_door()} generate --address {address}{tls} "Once upon a time"'
        print(f"  {line}", flush=True)

    async def _drain(self) -> None:
        await self._set_health(False)
        self.desk.close()
        logger.info("stopping: %d requests are running or waiting", len(self.desk))
        waits = {
            asyncio.ensure_future(self.desk.wait_until_empty()),
            asyncio.ensure_future(self._stopping_at_once.wait()),
        }
        await asyncio.wait(
            waits, timeout=self._settings.grace_s, return_when=asyncio.FIRST_COMPLETED
        )
        for wait in waits:
            wait.cancel()

    async def _close(self, server: grpc.aio.Server) -> None:
        """What is still running ends with UNAVAILABLE."""
        self.closing.set()
        if self._thread is not None:
            self._thread.stop()
            await asyncio.to_thread(self._thread.join, 30.0)
            self._stop_metrics()
        await server.stop(1.0)
        logger.info("stopped")

    def _on_health(self, healthy: bool) -> None:
        """Called from the engine's thread."""
        if healthy:
            logger.info("steps succeed again")
        else:
            logger.error("step after step fails; health says NOT_SERVING until one succeeds")
        asyncio.run_coroutine_threadsafe(self._set_health(healthy), self._loop)

    async def _set_health(self, healthy: bool) -> None:
        serving = healthy and not self._stopping.is_set()
        states = health_pb2.HealthCheckResponse
        state = states.SERVING if serving else states.NOT_SERVING
        for service in ("", SERVICE):
            await self._health.set(service, state)

    def _report(self, record: Record) -> None:
        self.metrics.finish(record)
        record.log()


def _front_door() -> str:
    """How this very program was called, so that the line can be typed as it is."""
    called = Path(sys.argv[0])
    return sys.argv[0] if called.stem == "quill" and called.suffix == "" else "quill"


def _bind(server: grpc.aio.Server, settings: Settings) -> int:
    host, port = settings.host, settings.port
    credentials = None if settings.tls is None else server_credentials(settings.tls)
    try:
        if credentials is None:
            return server.add_insecure_port(f"{host}:{port}")
        return server.add_secure_port(f"{host}:{port}", credentials)
    except RuntimeError as error:
        raise StartError(
            f"can't listen at {host}:{port}: is another server there? Give another --port, or 0 "
            "for any free one"
        ) from error
