"""`quill serve`: a server from the opening of its port to its end in good order.

Knows: the order of starting and stopping, signals. Does not know: what calls do.
"""

import asyncio
import contextlib
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry

from quill.export.precisions import Family
from quill.server.addresses import reachable, write_address
from quill.server.api.accept_probe import AcceptProbe
from quill.server.api.grpc_server import SERVICE, Health, bind, make_server
from quill.server.api.servicer import Administration, TextGeneration
from quill.server.auth.caller import RateLimits
from quill.server.auth.key_file import Keyring
from quill.server.auth.tls import certificate_expiry
from quill.server.engine.dispatcher import Admission, Dispatcher
from quill.server.errors import ReloadError
from quill.server.frontend.call import Calls
from quill.server.frontend.served_model import ServedModel
from quill.server.http.app import App, MetricsApp
from quill.server.http.connection import HttpServer
from quill.server.kserve.servicer import InferenceService
from quill.server.loading.instance import ModelLoader, Reloader
from quill.server.machine.grpc_sockets import disconnect_all, stop_listening
from quill.server.settings import Settings
from quill.server.telemetry.call_record import Record
from quill.server.telemetry.metrics import Metrics
from quill.server.telemetry.tracing import open_tracing

logger = logging.getLogger(__name__)

# How long nobody may have called before connections end, and how long that is waited for: calls
# that are under way are refused in words, and logged.
QUIET_S = 0.05
MAX_QUIET_S = 1.0


class Server:
    """One server, from the opening of its port to its end. Belongs to one event loop."""

    def __init__(
        self,
        loader: ModelLoader,
        settings: Settings,
        limits: RateLimits | None = None,
    ) -> None:
        self._loader = loader
        self._settings = settings
        self.health = Health(SERVICE)
        self.metrics = Metrics(max_keys=settings.max_key_labels)
        self._tracing = open_tracing() if settings.tracing else None
        self.dispatcher = Dispatcher(Admission(settings.max_queue), self.metrics.observe)
        self._watch()
        self.reloader = Reloader(
            self.dispatcher.publish,
            self.health.note_soon,
            settings.watchdog_s,
            self.metrics.note_restart,
            self._lose_engine,
        )
        self.calls = Calls(
            self.dispatcher,
            lambda: self.reloader.instance,
            self._report,
            limits,
            settings.share_prefix_cache,
        )
        self._probe = AcceptProbe(self.health.note_soon)
        self.metrics.watch("quill_oldest_unread_call_seconds", lambda: self._probe.age_s)
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
        self._reloads: set[asyncio.Task[ServedModel]] = set()

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
            instance = await self.reloader.reload(self._loader.reload)
        except ReloadError as error:
            logger.error("%s", error)
            raise
        self.metrics.set_model(instance.served.limits, instance.served.labels)
        return instance.served

    def reload_soon(self) -> None:
        """The same, for a signal: the log says how it went."""
        task = asyncio.ensure_future(self.reload())
        self._reloads.add(task)
        task.add_done_callback(self._end_reload)

    def _end_reload(self, task: "asyncio.Task[ServedModel]") -> None:
        self._reloads.discard(task)
        if not task.cancelled() and not isinstance(task.exception(), ReloadError | None):
            logger.error("a bug in reloading", exc_info=task.exception())

    async def run(self) -> None:
        server = await self._listen()
        watching = asyncio.gather(self.reloader.watch(), self._probe.run())
        try:
            if await self._open():
                await self._stopping.wait()
                await self._drain()
        finally:
            watching.cancel()
            await self._close(server)

    async def _listen(self) -> grpc.aio.Server:
        settings = self._settings
        server = self._make_server()
        await self.health.begin()
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
            InferenceService(calls, self.metrics.registry, lambda: health.is_serving, timeout_s),
            Administration(calls, None if self._keyring is None else self._asked_to_reload),
            health.servicer,
            self._probe.secret,
        )

    async def _asked_to_reload(self) -> ServedModel:
        """By an administrator's call."""
        return await self.reload()

    async def _open_http(self) -> None:
        if not self._settings.http_ports:
            return
        settings, health = self._settings, self.health
        registry = self.metrics.registry
        app = App(self.calls, settings, self._keyring, registry, lambda: health.is_serving)
        self._http = HttpServer(app, settings, settings.http_ports)
        self.http_port = await self._http.open()

    async def _open(self) -> bool:
        """Loads the model while health says NOT_SERVING. False: stopped before it was ready."""
        loading = asyncio.ensure_future(self.reloader.take_over(self._loader.load))
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not loading.done():
            loading.cancel()
            return False
        served = loading.result().served
        self.metrics.set_model(served.limits, served.labels)
        self.dispatcher.open()
        await self._open_metrics()
        await self.health.note("loading", False)
        self._log_ready(served.manifest.family)
        self.ready.set()
        return True

    async def _open_metrics(self) -> None:
        if self._settings.metrics_ports:
            await self._serve_metrics(self._settings.metrics_ports)

    async def _serve_metrics(self, ports: Sequence[int]) -> None:
        settings = self._settings
        keyring = None if "metrics" in settings.allow_unauthenticated else self._keyring
        app = MetricsApp(self._shown_registry(), keyring)
        self._metrics_http = HttpServer(app, settings, ports, "--metrics-port")
        self.metrics_port = await self._metrics_http.open()

    async def _close_metrics(self) -> None:
        if self._metrics_http is not None:
            await self._metrics_http.close()

    def _shown_registry(self) -> CollectorRegistry:
        return self.metrics.registry

    def _log_ready(self, family: Family) -> None:
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
        await self.health.note("stopping", True)
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

    async def _close(self, server: grpc.aio.Server) -> None:
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


_WORDS: dict[Family, tuple[str, str]] = {
    "causal": ("generate", "Once upon a time"),
    "seq2seq": ("generate", "Restart the server"),
    "encoder": ("embed", "The state of the union"),
}


def http_url(settings: Settings, port: int, path: str = "") -> str:
    scheme = "http" if settings.tls is None else "https"
    return f"{scheme}://{write_address(reachable(settings.host), port)}{path}"


def line_to_type(settings: Settings, port: int, family: Family) -> str:
    """On this machine, as it is but for the names of files."""
    # Some shells take brackets for a pattern.
    address = shlex.quote(write_address(reachable(settings.host), port))
    command, text = _WORDS[family]
    return " ".join([quill_command(), command, "--address", address, *proof(settings), f'"{text}"'])


def proof(settings: Settings) -> list[str]:
    """What a command must be given to be let in."""
    needed = []
    if settings.tls is not None:
        needed += ["--ca", "CA.pem"]
        if settings.tls.client_ca is not None:
            needed += ["--cert", "CLIENT.pem", "--key", "CLIENT.key"]
    if settings.api_keys is not None:
        needed += ["--api-key-file", "FILE"]
    return needed


def quill_command() -> str:
    """How this very program was called, so that the line can be typed as it is."""
    called = Path(sys.argv[0])
    return sys.argv[0] if called.stem == "quill" and called.suffix == "" else "quill"
