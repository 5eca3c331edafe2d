"""From a bundle on disk to an engine that is ready, and to a model that serves in this process.

Knows: bundles, settings, Quill's library of operators. Does not know: ports, signals, calls.
`quill serve` loads in a process of its own instead: see server/process/loader.py.
"""

import asyncio
import logging
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import onnxruntime

from quill.export.bundle.manifest import Manifest, read_manifest
from quill.export.operators.library import operators_problem
from quill.export.precisions import Family
from quill.server.disk_cache.block_folder import BlockFolder
from quill.server.engine.engine import Engine
from quill.server.engine.engine_thread import EngineThread
from quill.server.engine.kv_cache import BlockShape
from quill.server.errors import StartError
from quill.server.grammar.compiler import Compiler
from quill.server.loading.choices import (
    Choice,
    choose_graphs,
    choose_limits,
    choose_threads,
    megabytes,
    weight_bytes,
)
from quill.server.loading.description import EngineInfo, describe
from quill.server.loading.engine_factory import (
    Bundle,
    open_block_folder,
    open_bundle,
    open_engine,
)
from quill.server.loading.instance import (
    EngineEvents,
    ModelInstance,
    RunningEngine,
    StartEngine,
)
from quill.server.machine.memory import drop_startup_pages
from quill.server.machine.onnx_session import cuda_free_bytes
from quill.server.machine.resources import available_bytes
from quill.server.outputs import EngineOutputs, FailEvent
from quill.server.request import GrammarCompiler, Limits, PoolingParams, Request
from quill.server.settings import Settings
from quill.tokenizer_growth import read_checked

logger = logging.getLogger(__name__)

BUILD_OPERATORS = (sys.executable, "-m", "quill.export.operators.build")


class LoadedEngine(NamedTuple):
    """An engine that has run its first step."""

    engine: Engine
    grammars: GrammarCompiler | None  # None: the model can't follow constraints
    info: EngineInfo


def load_engine(directory: Path, settings: Settings) -> LoadedEngine:
    """StartError: the bundle can't be served like this."""
    manifest = read_manifest(directory)
    require_operators()
    choice = choose_graphs(manifest, settings.device, settings.precision)
    on_cuda = choice.graphs.device == "cuda"
    available = cuda_free_bytes() if on_cuda else available_bytes()
    limits = choose_limits(manifest, choice.graphs, available, settings)
    num_threads = choose_threads(settings.threads)
    _log_choice(manifest, choice, limits, num_threads)
    bundle = open_bundle(directory, choice.graphs.precision)
    if bundle.manifest != manifest:
        raise StartError(f"{directory} changed while it was loaded. Try again")
    folder = _open_folder(bundle, settings)
    try:
        engine = open_engine(bundle, limits, num_threads, settings.spinning, folder)
        warm_up(engine, bundle.manifest.family)
    except MemoryError as error:
        raise StartError(
            f"there is too little memory for {directory} ({str(error) or 'none is left'}). Give "
            "the process more, or try a smaller --kv-cache-mb or --context"
        ) from error
    drop_startup_pages()
    grammars = open_grammars(directory, manifest)
    info = EngineInfo(
        manifest=manifest,
        precision=choice.graphs.precision,
        limits=limits,
        runtime_version=onnxruntime.__version__,
        takes_constraints=grammars is not None,
    )
    return LoadedEngine(engine, grammars, info)


def _open_folder(bundle: Bundle, settings: Settings) -> BlockFolder | None:
    if settings.prefix_cache_dir is None:
        return None
    most = settings.prefix_cache_dir_mb
    folder = open_block_folder(bundle, settings.prefix_cache_dir, most)
    logger.info(
        "%s has %d blocks of this model, %s of %s are used",
        settings.prefix_cache_dir,
        len(folder.keys),
        megabytes(folder.used_bytes),
        megabytes(most * 2**20),
    )
    return folder


class Loader:
    """Loads the bundle of one directory into this process."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        self._directory = directory
        self._settings = settings

    def load(self) -> ModelInstance:
        loaded = load_engine(self._directory, self._settings)
        served = describe(self._directory, loaded.info, self._settings)
        return ModelInstance(served, in_thread(loaded.engine, loaded.grammars))

    reload = load


def in_thread(engine: Engine, grammars: GrammarCompiler | None = None) -> StartEngine:
    """For an engine in this process."""

    def start(events: EngineEvents) -> RunningEngine:
        soon = asyncio.get_running_loop().call_soon_threadsafe

        def publish(outputs: EngineOutputs) -> None:
            soon(events.publish, outputs)

        def note_health(is_good: bool) -> None:
            soon(events.on_health, is_good)

        thread = EngineThread(engine, publish, note_health, grammars)
        thread.start()
        return thread

    return start


def open_grammars(directory: Path, manifest: Manifest) -> Compiler | None:
    """None: the model can't follow constraints."""
    if manifest.tokenizer is None or manifest.family == "encoder" or not manifest.stop_ids:
        return None
    try:
        tokenizer_json = (directory / manifest.tokenizer).read_text("utf-8")
        read_checked(tokenizer_json)
        sizes, stop_ids = manifest.sizes, manifest.stop_ids
        return Compiler(tokenizer_json, sizes.vocab_size, stop_ids)
    except ValueError as error:
        logger.info("constraints can't be followed with this tokenizer: %s", error)
        return None


def require_operators() -> None:
    """Compiles Quill's library of operators where set-up didn't, which takes a minute."""
    problem = operators_problem()
    if problem is None:
        return
    logger.info("%s; compiling them now, which takes a minute", problem)
    done = subprocess.run(BUILD_OPERATORS, capture_output=True, text=True, check=False)
    left = operators_problem()
    if left is not None:
        raise StartError(f"{left}. Compiling them failed: {done.stderr.strip() or 'no message'}")


def _log_choice(manifest: Manifest, choice: Choice, limits: Limits, threads: int) -> None:
    graphs, name = choice.graphs, manifest.name
    logger.info("bundle %s: %s on %s (%s)", name, graphs.precision, graphs.device, choice.why)
    block_bytes = 0 if graphs.decoder is None else BlockShape.of(manifest.sizes, graphs).num_bytes
    logger.info(
        "up to %d sequences, context %d, KV cache %s, model %s, %d threads",
        limits.max_num_seqs,
        limits.context,
        megabytes(limits.num_blocks * block_bytes),
        megabytes(weight_bytes(manifest, graphs)),
        threads,
    )


def warm_up(engine: Engine, family: Family) -> None:
    """The first step of a graph takes far longer than later ones: no client should wait for it."""
    engine.submit(_warm_up_request(family), 0.0)
    while not engine.is_idle:
        for event in engine.step().events:
            if isinstance(event, FailEvent):
                raise StartError(f"the model was loaded and can't run: {event.error}")


def _warm_up_request(family: Family) -> Request:
    if family == "encoder":
        return Request(request_id="warm-up", pooling=PoolingParams(texts=((0,),)), max_new_tokens=0)
    source_ids = None if family == "causal" else (0,)
    return Request(request_id="warm-up", prompt_ids=(0,), source_ids=source_ids, max_new_tokens=2)
