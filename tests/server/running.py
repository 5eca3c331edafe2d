"""A server in this process, on a free port of its own, and a manifest to go with it."""

import asyncio
import atexit
import contextlib
import dataclasses
import functools
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quill.export.bundle.manifest import Graphs, Manifest, Sizes, SpecialTokens
from quill.model.data.tokenizer import byte_tokenizer
from quill.server.client.sync_client import Client
from quill.server.engine.engine import Engine
from quill.server.frontend.served_model import ServedModel
from quill.server.grammar.checker import GrammarChecker
from quill.server.grammar.compiler import Compiler
from quill.server.loading.instance import ModelInstance
from quill.server.loading.loader import in_thread
from quill.server.request import Limits
from quill.server.settings import PortChoice, Settings, TlsFiles
from quill.server.telemetry.call_record import Record
from quill.server.text.chat_template import ChatTemplate
from quill.server.text.tokenizer import Text
from tests.server.scripted_session import D_MODEL, END, TIMEOUT_S, VOCAB_SIZE, Reciter

if TYPE_CHECKING:
    from quill.server.serve.server import Server

CONTEXT = 200
NUM_BLOCKS = 256
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + '<|endoftext|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'k' }}{% endif %}"
)


def make_manifest(**changes: Any) -> Manifest:
    graphs = Graphs(
        precision="fp32",
        device="cpu",
        decoder="decoder",
        encoder=None,
        weights="weights",
        cache_type="float32",
        quantization=None,
        verification=None,
        invariance=None,
    )
    manifest = Manifest(
        format_version=1,
        name="reciter",
        family="causal",
        onnxruntime="1.31.1",
        sizes=_sizes(),
        special_tokens=SpecialTokens(bos=END, eos=END, pad=None, unk=None),
        prepend_bos=False,
        stop_ids=(END,),
        chat_template=TEMPLATE,
        generation={"temperature": 0.0},
        provenance={},
        tokenizer="tokenizer.json",
        graphs=(graphs,),
        files=(),
    )
    return dataclasses.replace(manifest, **changes)


def _sizes() -> Sizes:
    return Sizes(
        vocab_size=VOCAB_SIZE,
        context=CONTEXT,
        d_model=D_MODEL,
        num_layers=1,
        num_encoder_layers=0,
        num_heads=1,
        num_kv_heads=1,
        head_size=1,
        d_ff=1,
        num_parameters=1,
    )


def make_embedder(**changes: Any) -> ServedModel:
    """A causal model whose graphs give hidden states, too."""
    served = make_served(**changes)
    return dataclasses.replace(served, graphs=dataclasses.replace(served.graphs, hidden=True))


def make_text() -> Text:
    return Text(byte_tokenizer()._json)


@functools.cache
def make_grammars() -> Compiler:
    return Compiler(byte_tokenizer()._json, VOCAB_SIZE, [END])


@functools.cache
def make_checker() -> GrammarChecker:
    """Of all servers of this process: its worker starts with the first constraint."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "tokenizer.json"
    path.write_text(byte_tokenizer()._json)
    return GrammarChecker(path, VOCAB_SIZE, [END])


def make_served(max_num_seqs: int = 4, max_waiting: int = 4, **changes: Any) -> ServedModel:
    manifest = make_manifest()
    return dataclasses.replace(
        ServedModel(
            manifest=manifest,
            graphs=manifest.graphs[0],
            device="cpu",
            runtime_version="1.31.1",
            deterministic=True,
            # Tests let so many steps go, and count on a token for each.
            limits=Limits(
                max_num_seqs=max_num_seqs, context=CONTEXT, num_blocks=NUM_BLOCKS, speculative=False
            ),
            max_waiting=max_waiting,
            max_message_bytes=2**20,
            text=make_text(),
            template=ChatTemplate(TEMPLATE, {}),
            grammars=make_checker(),
        ),
        **changes,
    )


class Running:
    """A server on a loop of its own, in a thread of its own."""

    def __init__(self, session: Reciter, settings: Settings, served: ServedModel) -> None:
        self.session = session
        self._settings = settings
        self._served = served
        self._started: Future[Server] = Future()
        self._thread = threading.Thread(target=self._run)
        self.records: queue.Queue[Record] = queue.Queue()
        self.loading = threading.Event()
        self.loading.set()
        self.load_again: Callable[[], ModelInstance] = self.load
        self.ahead_s = 0.0  # by so much the engine's clock is ahead: deadlines pass for it alone

    def load(self) -> ModelInstance:
        assert self.loading.wait(TIMEOUT_S)
        engine = Engine(self.session, self._served.limits, self._engine_clock)
        return ModelInstance(self._served, in_thread(engine, make_grammars()))

    def _engine_clock(self) -> float:
        return time.monotonic() + self.ahead_s

    def reload(self) -> ModelInstance:
        return self.load_again()

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        # Tests that only describe a model do without the server: see tests/tiers.py.
        from quill.server.serve.server import Server

        self._loop = asyncio.get_running_loop()
        server = Server(self, self._settings)
        report = server.calls.report

        def note(record: Record) -> None:
            report(record)
            self.records.put(record)

        server.calls.report = note
        # What a test has used up of a key's quota doesn't come back while the test runs.
        server.calls.limits._quotas._clock = lambda: 0.0
        running = asyncio.ensure_future(server.run())
        await asyncio.wait({running, asyncio.ensure_future(server.listening.wait())},
                           return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
        self._started.set_result(server)
        await running

    def start(self, wait: bool = True) -> None:
        self._thread.start()
        self.server = self._started.result(TIMEOUT_S)
        if wait:
            self.call(self.server.ready.wait())

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    @property
    def http_port(self) -> int:
        assert self.server.http_port is not None
        return self.server.http_port

    def call(self, coroutine: Any) -> Any:
        """Runs something on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_S)

    def next_record(self, outcome: str) -> Record:
        """Waits for a call to end so."""
        while (record := self.records.get(timeout=TIMEOUT_S)).outcome != outcome:
            pass
        return record

    def wait_for_waiting(self, number: int) -> None:
        admission = self.server.dispatcher.admission
        self.wait_for(lambda: admission.num_waiting == number)

    def wait_for_requests(self, number: int) -> None:
        self.wait_for(lambda: len(self.server.dispatcher) == number)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Lets the server's loop turn until it is so."""

        async def turn() -> None:
            async with asyncio.timeout(TIMEOUT_S):
                while not condition():
                    await asyncio.sleep(0.001)

        self.call(turn())

    def stop(self) -> None:
        """What a signal does."""
        self._loop.call_soon_threadsafe(self.server.stop)

    def stop_at_once(self) -> None:
        """What two signals do; sent as one, since the first alone may end an idle server."""

        def stop_twice() -> None:
            self.server.stop()
            self.server.stop()

        with contextlib.suppress(RuntimeError):  # it has ended by itself meanwhile
            self._loop.call_soon_threadsafe(stop_twice)

    def join(self) -> None:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the server doesn't end"


@contextmanager
def running_server(
    max_num_seqs: int = 4,
    max_waiting: int = 4,
    wait: bool = True,
    served: ServedModel | None = None,
    session: Reciter | None = None,
    tls: TlsFiles | None = None,
    **changes: Any,
) -> Iterator[Running]:
    """`changes`: of the settings."""
    changes = {"port": 0, "http_port": "off", "metrics_port": "off", **changes}
    if tls is not None:
        changes |= {"tls_cert": tls.cert, "tls_key": tls.key, "client_ca": tls.client_ca}
    settings = Settings(max_queue=max_waiting, max_message_bytes=2**20, **changes)
    served = served or make_served(max_num_seqs, max_waiting)
    running = Running(session or Reciter(), settings, served)
    if not wait:
        running.loading.clear()
    running.start(wait)
    try:
        yield running
    finally:
        running.session.let_go()
        running.loading.set()
        running.stop_at_once()
        running.join()


class RunningBundle(Running):
    """A server in this process on a real bundle."""

    def __init__(self, directory: Path, precision: str, http_port: PortChoice = "off") -> None:
        from quill.server.loading.loader import Loader

        settings = Settings(
            port=0,
            http_port=http_port,
            metrics_port="off",
            max_num_seqs=8,
            threads=1,
            precision=precision,
        )
        super().__init__(Reciter(), settings, make_served())
        self._loader = Loader(directory, settings)

    def load(self) -> ModelInstance:
        return self._loader.load()


@contextmanager
def served_bundle(directory: Path, precision: str = "fp32") -> Iterator[Client]:
    running = RunningBundle(directory, precision)
    running.start()
    with Client(running.address) as client:
        yield client
    running.stop()
    running.join()


SERVICE = "quill.v1.TextGeneration"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def health_of(running: Running, service: str = SERVICE) -> int:
    with grpc.insecure_channel(running.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
        return int(reply.status)
