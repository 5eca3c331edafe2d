"""From a bundle on disk to a model that serves: the engine, the tokenizer, the chat template.

Knows: bundles, settings, Quill's library of operators. Does not know: ports, signals, calls.
"""

import logging
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, Protocol

import onnxruntime

from quill.export.bundle.manifest import Manifest, read_manifest
from quill.export.operators.library import operators_problem
from quill.export.precisions import Family
from quill.server.engine.engine import Engine
from quill.server.engine.kv_cache import BlockShape
from quill.server.errors import StartError
from quill.server.frontend.served_model import ServedModel
from quill.server.grammar.checker import GrammarChecker
from quill.server.grammar.compiler import Compiler
from quill.server.loading.choices import (
    Choice,
    choose_graphs,
    choose_limits,
    choose_threads,
    megabytes,
    weight_bytes,
)
from quill.server.loading.engine_factory import Bundle, open_bundle, open_engine
from quill.server.loading.instance import ModelInstance
from quill.server.machine.memory import drop_startup_pages
from quill.server.machine.onnx_session import cuda_free_bytes
from quill.server.machine.resources import available_bytes
from quill.server.outputs import FailEvent
from quill.server.request import Limits, PoolingParams, Request
from quill.server.settings import Settings
from quill.server.text.chat_template import ChatTemplate
from quill.server.text.tokenizer import Text

logger = logging.getLogger(__name__)

BUILD_OPERATORS = (sys.executable, "-m", "quill.export.operators.build")


class ModelLoader(Protocol):
    """What a server needs. Both take seconds to minutes, so another thread calls them."""

    def load(self) -> ModelInstance: ...
    def reload(self) -> ModelInstance: ...


class _Chosen(NamedTuple):
    choice: Choice
    limits: Limits
    num_threads: int


class Loader:
    """Loads the bundle of one directory. StartError, at once: it can't be served like this."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        self._directory = directory
        self._settings = settings
        self._chosen = self._choose()

    def load(self) -> ModelInstance:
        """By what was chosen when the loader was made."""
        choice, limits, num_threads = self._chosen
        bundle = open_bundle(self._directory, choice.graphs.precision)
        try:
            engine = open_engine(bundle, limits, num_threads, self._settings.spinning)
            warm_up(engine, bundle.manifest.family)
            grammars = open_grammars(bundle)
            served = describe(bundle, limits, self._settings, grammars is not None)
            instance = ModelInstance(served, engine, grammars)
        except MemoryError as error:
            raise StartError(
                f"there is too little memory for {self._directory} "
                f"({str(error) or 'none is left'}). Give the process more, or try a smaller "
                "--kv-cache-mb or --context"
            ) from error
        drop_startup_pages()
        return instance

    def reload(self) -> ModelInstance:
        """The bundle as it is on disk now: it is read and chosen from anew."""
        self._chosen = self._choose()
        return self.load()

    def _choose(self) -> _Chosen:
        settings = self._settings
        manifest = read_manifest(self._directory)
        require_operators()
        choice = choose_graphs(manifest, settings.device, settings.precision)
        on_cuda = choice.graphs.device == "cuda"
        available = cuda_free_bytes() if on_cuda else available_bytes()
        limits = choose_limits(manifest, choice.graphs, available, settings)
        num_threads = choose_threads(settings.threads)
        _log_choice(manifest, choice, limits, num_threads)
        return _Chosen(choice, limits, num_threads)


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


def describe(
    bundle: Bundle, limits: Limits, settings: Settings, takes_constraints: bool
) -> ServedModel:
    text = _open_text(bundle)
    return ServedModel(
        manifest=bundle.manifest,
        graphs=bundle.graphs,
        device=bundle.graphs.device,
        runtime_version=onnxruntime.__version__,
        deterministic=bundle.is_invariant,
        limits=limits,
        max_waiting=settings.max_queue,
        max_message_bytes=settings.max_message_bytes,
        text=text,
        template=_open_template(bundle, text),
        grammars=_open_checker(bundle) if takes_constraints else None,
    )


def _open_text(bundle: Bundle) -> Text | None:
    manifest = bundle.manifest
    if manifest.tokenizer is None:
        return None
    bos = manifest.special_tokens.bos if manifest.prepend_bos else None
    # A source, or a text to embed, ends as those did that the model learnt from.
    ends = {"seq2seq": True, "encoder": manifest.append_eos, "causal": False}[manifest.family]
    eos = manifest.special_tokens.eos if ends else None
    return Text.load(bundle.directory / manifest.tokenizer, bos, eos)


def open_grammars(bundle: Bundle) -> Compiler | None:
    """None: the model can't follow constraints."""
    manifest = bundle.manifest
    if manifest.tokenizer is None or manifest.family == "encoder" or not manifest.stop_ids:
        return None
    tokenizer_json = (bundle.directory / manifest.tokenizer).read_text("utf-8")
    try:
        sizes, stop_ids = manifest.sizes, manifest.stop_ids
        return Compiler(tokenizer_json, sizes.vocab_size, stop_ids)
    except ValueError as error:
        logger.info("constraints can't be followed with this tokenizer: %s", error)
        return None


def _open_checker(bundle: Bundle) -> GrammarChecker | None:
    manifest = bundle.manifest
    if manifest.tokenizer is None:
        return None
    path = bundle.directory / manifest.tokenizer
    return GrammarChecker(path, manifest.sizes.vocab_size, manifest.stop_ids)


def _open_template(bundle: Bundle, text: Text | None) -> ChatTemplate | None:
    manifest = bundle.manifest
    if manifest.chat_template is None or text is None:
        return None
    special = manifest.special_tokens
    parts = {"bos": special.bos, "eos": special.eos, "pad": special.pad, "unk": special.unk}
    names = {f"{part}_token": text.piece(id) for part, id in parts.items() if id is not None}
    return ChatTemplate(manifest.chat_template, names)
