"""`quill serve`: from the command line to a server that answers, and to its end in good order.

Knows: the order of starting and stopping, signals, ports. Does not know: what calls do.
"""

import argparse
import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import onnxruntime
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from export.manifest import read_manifest
from protos import generation_pb2 as pb
from protos import generation_pb2_grpc as pb_grpc
from server.admission import Admission
from server.chat import ChatTemplate
from server.default_model import default_bundle
from server.desk import Desk
from server.device import Choice, choose_graphs
from server.engine import Engine
from server.engine_thread import EngineThread
from server.errors import StartError
from server.loading import Bundle, EngineSettings, open_bundle, open_engine
from server.metrics import Metrics, serve_metrics
from server.record import Record, set_up_logging
from server.served import Served
from server.servicer import TextGeneration
from server.sizing import Sizing, available_bytes, choose_sizes, gigabytes, num_cores
from server.text import Text
from server.unreadable import RefuseUnreadable

logger = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["TextGeneration"].full_name
MAX_MESSAGE_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a person may choose. None: the server chooses, and says what."""

    host: str = "127.0.0.1"
    port: int = 50051  # 0: any free one
    metrics_port: int | None = None  # None: no metrics
    device: str = "auto"
    precision: str | None = None
    max_rows: int | None = None
    context: int | None = None
    cache_bytes: int | None = None
    threads: int | None = None
    exact: bool = True
    max_waiting: int = 256
    max_message_bytes: int = MAX_MESSAGE_BYTES
    grace_s: float = 30.0
    write_timeout_s: float = 60.0  # a reader that takes longer is ended


@dataclass(frozen=True)
class Loaded:
    served: Served
    engine: Engine


Load = Callable[[], Loaded]


def run(args: argparse.Namespace) -> None:
    set_up_logging(args.log_format)
    settings = _settings(args)
    directory = args.bundle or default_bundle()
    load = prepare(directory, settings)
    asyncio.run(serve(load, settings))


def _settings(args: argparse.Namespace) -> Settings:
    metrics_port = args.metrics_port
    if metrics_port == "auto":
        metrics_port = args.port + 1 if args.port else 0
    return Settings(
        host=args.host,
        port=args.port,
        metrics_port=None if metrics_port == "off" else int(metrics_port),
        device=args.device,
        precision=args.precision,
        max_rows=args.max_slots,
        context=args.context,
        cache_bytes=None if args.prefix_cache is None else args.prefix_cache * 2**20,
        threads=args.threads,
        exact=args.exact,
        max_waiting=args.queue,
        grace_s=args.grace,
    )


def prepare(directory: Path, settings: Settings) -> Load:
    """Looks at the bundle, chooses what wasn't chosen, says so. The rest takes longer."""
    manifest = read_manifest(directory)
    choice = choose_graphs(manifest, settings.device, settings.precision)
    sizing = choose_sizes(
        manifest,
        choice.graphs,
        available_bytes(),
        max_rows=settings.max_rows,
        context=settings.context,
        cache_bytes=settings.cache_bytes,
    )
    threads = settings.threads or num_cores()
    _say_choice(manifest.name, choice, sizing, threads)
    engine_settings = EngineSettings(
        max_rows=sizing.max_rows,
        context=sizing.context,
        cache_bytes=sizing.cache_bytes,
        num_threads=threads,
        exact=settings.exact,
    )
    return lambda: _load(directory, choice, engine_settings, settings)


def _say_choice(name: str, choice: Choice, sizing: Sizing, threads: int) -> None:
    logger.info("bundle %s: %s on the cpu (%s)", name, choice.graphs.precision, choice.why)
    logger.info(
        "%d slots of %d tokens (%s when full), prefix cache %s, model %s, %d threads",
        sizing.max_rows,
        sizing.context,
        gigabytes(sizing.max_rows * sizing.slot_bytes),
        gigabytes(sizing.cache_bytes),
        gigabytes(sizing.weight_bytes),
        threads,
    )


def _load(
    directory: Path, choice: Choice, engine_settings: EngineSettings, settings: Settings
) -> Loaded:
    bundle = open_bundle(directory, choice.graphs.precision)
    engine = open_engine(bundle, engine_settings)
    return Loaded(describe(bundle, engine_settings, settings), engine)


def describe(bundle: Bundle, engine_settings: EngineSettings, settings: Settings) -> Served:
    text = _open_text(bundle)
    return Served(
        manifest=bundle.manifest,
        graphs=bundle.graphs,
        device="cpu",
        runtime_version=onnxruntime.__version__,
        deterministic=bundle.is_invariant and engine_settings.exact,
        context=engine_settings.context,
        max_rows=engine_settings.max_rows,
        max_waiting=settings.max_waiting,
        max_message_bytes=settings.max_message_bytes,
        text=text,
        template=_open_template(bundle, text),
    )


def _open_text(bundle: Bundle) -> Text | None:
    manifest = bundle.manifest
    if manifest.tokenizer is None:
        return None
    bos = manifest.special_tokens.bos if manifest.prepend_bos else None
    return Text.load(bundle.directory / manifest.tokenizer, bos)


def _open_template(bundle: Bundle, text: Text | None) -> ChatTemplate | None:
    manifest = bundle.manifest
    if manifest.chat_template is None or text is None:
        return None
    special = manifest.special_tokens
    parts = {"bos": special.bos, "eos": special.eos, "pad": special.pad, "unk": special.unk}
    names = {f"{part}_token": text.piece(id) for part, id in parts.items() if id is not None}
    return ChatTemplate(manifest.chat_template, names)


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
        self.servicer = TextGeneration(self.desk, self._report, settings.write_timeout_s)
        self.port = 0
        self.metrics_port: int | None = None
        self.listening = asyncio.Event()
        self.ready = asyncio.Event()
        self.closing = asyncio.Event()
        self._stopping = asyncio.Event()
        self._stopping_at_once = asyncio.Event()
        self._health = health.aio.HealthServicer()
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
        server = grpc.aio.server(interceptors=[RefuseUnreadable(SERVICE)], options=options)
        pb_grpc.add_TextGenerationServicer_to_server(self.servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        await self._set_health(False)
        self.port = _bind(server, self._settings.host, self._settings.port)
        await server.start()
        self.listening.set()
        return server

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
            taken, stop = serve_metrics(self.metrics, self._settings.host, port)
            self.metrics_port, self._stop_metrics = taken, stop

    def _say_ready(self) -> None:
        address = f"{self._settings.host}:{self.port}"
        if self.metrics_port is not None:
            logger.info("metrics at http://%s:%d/metrics", self._settings.host, self.metrics_port)
        print(f"Serving at {address}. Now type:", flush=True)
        print(f'  quill generate --address {address} "Once upon a time"', flush=True)

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


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    try:
        return server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise StartError(
            f"can't listen at {host}:{port}: is another server there? Give another --port, or 0 "
            "for any free one"
        ) from error
