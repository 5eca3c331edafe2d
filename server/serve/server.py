"""`quill serve`: a server from the opening of its port to its end in good order.

Knows: the order of starting and stopping, signals. Does not know: what calls do.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from quill.export.precisions import Family
from quill.server.addresses import write_address
from quill.server.api.accept_probe import AcceptProbe
from quill.server.api.grpc_server import SERVICE, bind, make_server
from quill.server.api.health import Health
from quill.server.api.servicer import Administration, TextGeneration
from quill.server.auth.caller import RateLimits
from quill.server.auth.key_file import Keyring
from quill.server.auth.tls import certificate_expiry
from quill.server.engine.admission import QueueAdmission
from quill.server.engine.dispatcher import Admission, Dispatcher
from quill.server.errors import ReloadError
from quill.server.frontend.call import Calls
from quill.server.frontend.served_model import ServedModel
from quill.server.http.app import App, MetricsApp
from quill.server.http.connection import HttpServer
from quill.server.kserve.servicer import InferenceService
from quill.server.loading.instance import ModelLoader
from quill.server.loading.reloader import Reloader
from quill.server.machine.grpc_sockets import disconnect_all, stop_listening
from quill.server.serve.command_line import http_url, line_to_type
from quill.server.settings import Settings
from quill.server.telemetry.call_record import Record
from quill.server.telemetry.metrics import Metrics
from quill.server.telemetry.tracing import open_tracing

logger = logging.getLogger(__name__)

# How long nobody may have called before connections end, and how long that is waited for: calls
# that are under way are refused in words, and logged.
QUIET_S = 0.05
MAX_QUIET_S = 1.0


@dataclass(frozen=True)
class Shared:
    """What the frontends of a server share, as one of them has it."""

    limits: RateLimits
    admission: Admission
    registry: Callable[[], Awaitable[CollectorRegistry]]  # with the metrics of all
    is_first: bool  # which tells the user where the server is


class Server:
    """One server, from the opening of its port to its end. Belongs to one event loop."""

    def __init__(
        self,
        loader: ModelLoader,
        settings: Settings,
        limits: RateLimits | None = None,
        shared: Shared | None = None,
    ) -> None:
        """`shared`: this is one of several frontends."""
        self._loader = loader
        self._settings = settings
        self._shared = shared
        self.health = Health(SERVICE, settings.write_timeout_s)
        self.metrics = Metrics(max_keys=settings.max_key_labels)
        self._tracing = open_tracing() if settings.tracing else None
        admission = QueueAdmission(settings.max_queue) if shared is None else shared.admission
        self.dispatcher = Dispatcher(admission, self.metrics.observe)
        self._watch()
        self.reloader = Reloader(
            self.dispatcher.publish,
            self.health.note_soon,
            settings.watchdog_s,
            self._note_model,
            self.metrics.note_restart,
            self._lose_engine,
        )
        self.calls = Calls(
            self.dispatcher,
            lambda: self.reloader.instance,
            self._report,
            limits if shared is None else shared.limits,
            settings.share_prefix_cache,
        )
        self._probe = AcceptProbe(self.health.note_soon)
        self.metrics.watch("quill_oldest_unread_call_seconds", lambda: self._probe.age_s)
        self.on_loaded: Callable[[], None] = lambda: None
        self.has_failed = False
        self.port = 0
        self.metrics_port: int | None = None
        self.http_port: int | None = None
        self.listening = asyncio.Event()
        self.ready = asyncio.Event()
        self.closing = asyncio.Event()
        self._stopping = asyncio.Event()
        self._stopping_at_once = asyncio.Event()
        self._keyring = None if settings.api_keys is None else Keyring(settings.api_keys)
        self._http: HttpServer | None = None
        self._metrics_http: HttpServer | None = None
        self._tasks_begun: set[asyncio.Task[None]] = set()

    def _watch(self) -> None:
        """What metrics find out when they are read."""
        metrics, settings = self.metrics, self._settings
        metrics.watch_health(self.health.has)
        metrics.watch_engine(self._engine_pid)
        metrics.watch("quill_serving", lambda: self.health.is_serving)
        metrics.watch("quill_requests_waiting", lambda: self.dispatcher.admission.num_waiting)
        metrics.watch("quill_max_queue", lambda: settings.max_queue)
        if settings.tls is not None:
            expiry = certificate_expiry(settings.tls)
            metrics.watch("quill_certificate_expiry_timestamp_seconds", expiry.get)

    def _engine_pid(self) -> int:
        """0, which no process has, while there is none."""
        instance = self.reloader.instance
        return 0 if instance is None else instance.engine.pid

    def stop(self) -> None:
        """The first time in good order, the second time at once."""
        if self._stopping.is_set():
            self._stopping_at_once.set()
        self._stopping.set()

    def _lose_engine(self) -> None:
        """It can't be started again: whoever watches this process starts all anew."""
        self.has_failed = True
        self.stop()

    async def reload(self) -> ServedModel:
        """Serves the bundle as it is on disk now. A bad one is refused."""
        try:
            return (await self.reloader.reload(self._loader.reload)).served
        except ReloadError as error:
            logger.error("%s", error)
            raise

    def _note_model(self, served: ServedModel) -> None:
        self.metrics.set_model(served.limits, served.labels)
        self.on_loaded()

    def reload_soon(self) -> None:
        """The same, for a signal: the log says how it went."""
        self.begin(self._reload_logged())

    async def _reload_logged(self) -> None:
        with contextlib.suppress(ReloadError):
            await self.reload()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Beside the calls."""
        task = asyncio.ensure_future(work)
        self._tasks_begun.add(task)
        task.add_done_callback(self._end_task)

    def _end_task(self, task: "asyncio.Task[None]") -> None:
        self._tasks_begun.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a bug in the server", exc_info=task.exception())

    async def run(self) -> None:
        """Others serve while one of several frontends loads: callers mustn't come to it yet."""
        server = await self._listen() if self._shared is None else None
        watching = asyncio.gather(self.reloader.watch(), self._probe.run())
        try:
            if await self._load():
                server = server or await self._listen()
                await self._announce()
                await self._stopping.wait()
                await self._drain()
        finally:
            watching.cancel()
            await self._close(server)

    async def _listen(self) -> grpc.aio.Server:
        settings = self._settings
        server = self._make_server()
        self.port = bind(server, settings)
        server.add_insecure_port(self._probe.address)
        await self._open_http()
        await server.start()
        self.listening.set()
        return server

    def _make_server(self) -> grpc.aio.Server:
        settings, calls, health = self._settings, self.calls, self.health
        timeout_s = settings.write_timeout_s
        return make_server(
            settings,
            self._keyring,
            calls,
            TextGeneration(calls, timeout_s),
            InferenceService(calls, self._registry, lambda: health.is_serving, timeout_s),
            Administration(calls, None if self._keyring is None else self._asked_to_reload),
            health,
            self._probe.secret,
        )

    async def _asked_to_reload(self) -> ServedModel:
        """By an administrator's call."""
        return await self.reload()

    async def _open_http(self) -> None:
        if not self._settings.http_ports:
            return
        settings, health = self._settings, self.health
        app = App(self.calls, settings, self._keyring, self._registry, lambda: health.is_serving)
        self._http = HttpServer(app, settings, settings.http_ports)
        self.http_port = await self._http.open()

    async def _load(self) -> bool:
        """Loads the model while health says NOT_SERVING. False: stopped before it was ready."""
        loading = asyncio.ensure_future(self.reloader.take_over(self._loader.load))
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not loading.done():
            loading.cancel()
            return False
        loading.result()
        self.dispatcher.open()
        return True

    async def _announce(self) -> None:
        """That it serves."""
        await self._open_metrics()
        self.health.note("loading", False)
        if self.reloader.instance is not None:
            self._log_ready(self.reloader.instance.served.manifest.family)
        self.ready.set()

    async def _open_metrics(self) -> None:
        if self._settings.metrics_ports:
            await self._serve_metrics(self._settings.metrics_ports)

    async def _serve_metrics(self, ports: Sequence[int]) -> None:
        settings = self._settings
        keyring = None if "metrics" in settings.allow_unauthenticated else self._keyring
        app = MetricsApp(self._shown_registry, keyring)
        self._metrics_http = HttpServer(app, settings, ports, "--metrics-port")
        self.metrics_port = await self._metrics_http.open()

    async def _close_metrics(self) -> None:
        if self._metrics_http is not None:
            await self._metrics_http.close()

    async def _registry(self) -> CollectorRegistry:
        """With the metrics of all frontends."""
        return self.metrics.registry if self._shared is None else await self._shared.registry()

    async def _shown_registry(self) -> CollectorRegistry:
        return await self._registry()

    def _log_ready(self, family: Family) -> None:
        if self._shared is not None and not self._shared.is_first:
            return
        settings, metrics = self._settings, None
        if self.metrics_port is not None:
            metrics = http_url(settings, self.metrics_port, "/metrics")
            logger.info("metrics at %s", metrics)
        http = None
        if self.http_port is not None:
            http = http_url(settings, self.http_port)
            logger.info("HTTP at %s", http)
        address = write_address(settings.host, self.port)
        if settings.log_format == "json":  # nobody is there to type
            fields = {"address": address, "metrics": metrics, "http": http}
            logger.info("serving at %s", address, extra={"fields": fields})
            return
        _print(f"Serving at {address}. Now type:")
        _print(f"  {line_to_type(settings, self.port, family)}")

    async def _drain(self) -> None:
        self.health.note("stopping", True)
        self.dispatcher.close()
        logger.info("stopping: %d requests are running or waiting", len(self.dispatcher))
        waits = {
            asyncio.ensure_future(self.dispatcher.wait_until_empty()),
            asyncio.ensure_future(self._stopping_at_once.wait()),
        }
        await asyncio.wait(
            waits, timeout=self._settings.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        for wait in waits:
            wait.cancel()

    async def _close(self, server: grpc.aio.Server | None) -> None:
        """What is still running, or on its way to us, ends with UNAVAILABLE."""
        self.closing.set()
        await self.reloader.close()
        await self._close_metrics()
        stop_listening(self.port)
        if self._http is not None:
            self._http.stop_listening()
        await self.calls.wait_until_quiet(QUIET_S, MAX_QUIET_S)
        if self._http is not None:
            await self._http.close()
        disconnect_all(self.port)
        if server is not None:
            await server.stop(1.0)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        if self.ready.is_set():
            logger.info("stopped")

    def _report(self, record: Record) -> None:
        self.metrics.finish(record)
        record.log()
        if self._tracing is not None:
            self._tracing.report(record)


def _print(line: str) -> None:
    """A full disk, or a reader who has left, is no reason not to serve."""
    with contextlib.suppress(OSError):
        print(line, flush=True)
