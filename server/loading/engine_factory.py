"""From a bundle on disk to an engine that is ready to serve.

Knows: the manifest, what the engine is made of. Does not know: gRPC, text, the command line.
"""

from dataclasses import dataclass
from pathlib import Path

import onnxruntime

from quill.export.bundle.manifest import Graphs, Manifest, check_files, read_manifest
from quill.export.precisions import Device
from quill.server.engine.engine import Engine
from quill.server.errors import StartError
from quill.server.machine.huge_pages import huge_pages
from quill.server.machine.mapped_file import detach
from quill.server.runtime.device_slots import DeviceSlots
from quill.server.runtime.model_runner import OrtSession
from quill.server.runtime.onnx_session import SessionSettings, first_line, open_graph
from quill.server.runtime.prefix_cache import PrefixCache
from quill.server.runtime.slots import Slots, SlotShape
from quill.server.runtime.source_slots import Sources
from quill.server.sampling import native
from quill.server.scheduler.batch_invariance import padded
from quill.server.scheduler.scheduler import Limits


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files were checked, and the graphs to serve."""

    directory: Path
    manifest: Manifest
    graphs: Graphs

    @property
    def needs_padding(self) -> bool:
        """Whether a lone row would get another answer than one in a batch."""
        if self.graphs.invariance is not None:
            return self.graphs.invariance.min_rows > 1
        return self.graphs.precision != "fp32"

    @property
    def is_invariant(self) -> bool:
        """Whether that was measured, and held."""
        return self.graphs.invariance is not None and self.graphs.invariance.holds


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    max_rows: int
    context: int  # tokens of prompt and answer together; at most the model's
    cache_bytes: int = 0  # for the prefix cache; 0 turns it off
    num_threads: int = 0  # 0: as many as there are cores
    spinning: bool = True
    exact: bool = True  # the same seed gives the same tokens, where a lone row costs more for it


def open_bundle(directory: Path, precision: str) -> Bundle:
    """Refuses a bundle that is damaged, or that was made for another runtime."""
    manifest = read_manifest(directory)
    graphs = manifest.graphs_in(precision)
    if manifest.onnxruntime != onnxruntime.__version__:
        raise StartError(
            f"{directory} was verified with ONNX Runtime {manifest.onnxruntime}, and this is "
            f"{onnxruntime.__version__}. Export it again, or install the version that it names"
        )
    check_files(directory, manifest, manifest.files_for(graphs))
    return Bundle(directory, manifest, graphs)


def open_engine(bundle: Bundle, settings: EngineSettings) -> Engine:
    """Loads the weights and makes the slots."""
    manifest, graphs = bundle.manifest, bundle.graphs
    _check(bundle, settings)
    native.prepare(settings.num_threads)
    pad = settings.exact and bundle.needs_padding
    shape = SlotShape.of(manifest.sizes, settings.context, graphs.cache_type)
    num_slots = padded(settings.max_rows) if pad else settings.max_rows
    session_settings = SessionSettings(num_threads=settings.num_threads, spinning=settings.spinning)
    encoder = None
    with huge_pages():
        decoder = open_graph(
            bundle.directory / graphs.decoder,
            session_settings,
            graphs.device,
            graphs.needs_operators,
        )
        if graphs.encoder is not None:
            encoder = open_graph(
                bundle.directory / graphs.encoder,
                session_settings,
                operators=graphs.needs_operators,
            )
        detach(bundle.directory / graphs.weights)
    sources = None if encoder is None else Sources(encoder, Slots(num_slots, shape))
    slots = _make_slots(num_slots, shape, graphs.device)
    session = OrtSession(decoder, slots, manifest.sizes.vocab_size, pad, sources)
    _try_last_position(bundle, session, settings.context)
    limits = Limits(max_rows=settings.max_rows, context=settings.context)
    return Engine(session, limits, PrefixCache(settings.cache_bytes))


def _make_slots(num_slots: int, shape: SlotShape, device: Device) -> Slots | DeviceSlots:
    return Slots(num_slots, shape) if device == "cpu" else DeviceSlots(num_slots, shape, device)


def _try_last_position(bundle: Bundle, session: OrtSession, context: int) -> None:
    """A manifest may claim a longer context than the graphs have positions for. Only running them
    shows it: one token at the last position, which costs a step of one row."""
    try:
        if bundle.graphs.encoder is not None:
            session.encode(0, [0] * context)
        session.decode([0], [context - 1])
    except MemoryError:
        raise
    except Exception as error:  # the runtime has no class for these
        raise StartError(
            f"{bundle.directory} says that its context is {bundle.manifest.sizes.context} tokens, "
            f"and its graphs can't run with {context}. Try a smaller --context, or export the "
            f"bundle again. {first_line(error)}"
        ) from error


def _check(bundle: Bundle, settings: EngineSettings) -> None:
    if bundle.manifest.family == "seq2seq" and bundle.manifest.special_tokens.bos is None:
        raise StartError(
            f"{bundle.directory} holds a translation model and doesn't say which token its answers "
            "begin after. Export it again from a checkpoint with a bos token"
        )
    if bundle.graphs.device != "cpu" and bundle.manifest.family != "causal":
        raise StartError("translation models are served on the CPU only. Use --device cpu")
    if bundle.graphs.device != "cpu" and settings.cache_bytes:
        raise StartError(
            "there is no prefix cache on CUDA. Leave --prefix-cache out, or use --device cpu"
        )
    most = bundle.manifest.sizes.context
    if not 2 <= settings.context <= most:
        raise StartError(f"the context is {settings.context}; it must be from 2 to {most}")
    if settings.max_rows < 1:
        raise StartError(f"--max-slots is {settings.max_rows}; it must be at least 1")
