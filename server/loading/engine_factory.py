"""From a bundle on disk to an engine that is ready to serve.

Knows: the manifest, what the engine is made of. Does not know: gRPC, text, the command line.
"""

from dataclasses import dataclass
from pathlib import Path

import onnxruntime

from quill.export.bundle.manifest import Graphs, Manifest, check_files, read_manifest
from quill.server.engine.engine import Engine
from quill.server.engine.kv_cache import BlockShape, DeviceKVCache, KVCache
from quill.server.engine.model_runner import Chunk, EncoderSession, OrtSession, Session, Source
from quill.server.errors import StartError
from quill.server.loading.choices import only_on_cpu
from quill.server.machine.memory import detach, huge_pages
from quill.server.machine.onnx_session import first_line, open_graph
from quill.server.request import Limits
from quill.server.sampling import native


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files were checked, and the graphs to serve."""

    directory: Path
    manifest: Manifest
    graphs: Graphs


def open_bundle(directory: Path, precision: str) -> Bundle:
    """StartError: the bundle is damaged, or was made for another version of ONNX Runtime."""
    manifest = read_manifest(directory)
    graphs = manifest.graphs_in(precision)
    if manifest.onnxruntime != onnxruntime.__version__:
        raise StartError(
            f"{directory} was verified with ONNX Runtime {manifest.onnxruntime}, and this is "
            f"{onnxruntime.__version__}. Export it again, or install the version that it names"
        )
    check_files(directory, manifest, manifest.files_for(graphs))
    return Bundle(directory, manifest, graphs)


def open_engine(
    bundle: Bundle, limits: Limits, num_threads: int = 0, spinning: bool = True
) -> Engine:
    return Engine(open_session(bundle, limits, num_threads, spinning), limits)


def open_session(
    bundle: Bundle, limits: Limits, num_threads: int = 0, spinning: bool = True
) -> Session:
    """Loads the weights and allocates the KV cache. `num_threads` 0: one a core."""
    graphs = bundle.graphs
    _check(bundle, limits)
    native.prepare(num_threads)
    decoder = encoder = None
    with huge_pages():
        if graphs.decoder is not None:
            decoder = open_graph(
                bundle.directory / graphs.decoder, graphs.device, num_threads, spinning
            )
        if graphs.encoder is not None:
            encoder = open_graph(bundle.directory / graphs.encoder, "cpu", num_threads, spinning)
        detach(bundle.directory / graphs.weights)
    session = _session(bundle, decoder, encoder, limits)
    _try_last_position(bundle, session, limits)
    return session


def _session(
    bundle: Bundle,
    decoder: onnxruntime.InferenceSession | None,
    encoder: onnxruntime.InferenceSession | None,
    limits: Limits,
) -> Session:
    manifest, graphs = bundle.manifest, bundle.graphs
    if decoder is None:
        return EncoderSession(encoder, manifest.sizes)
    shape = BlockShape.of(manifest.sizes, graphs)
    blocks = (
        KVCache(limits.num_blocks, shape)
        if graphs.device == "cpu"
        else DeviceKVCache(limits.num_blocks, shape, graphs.device)
    )
    return OrtSession(decoder, blocks, manifest.sizes, encoder, gives_hidden=graphs.hidden)


def _try_last_position(bundle: Bundle, session: Session, limits: Limits) -> None:
    """A manifest may claim a longer context than the graphs have positions for. Only running them
    shows it: one token at the last position, which costs a step of one row; for an encoder, a text
    that reaches there."""
    context = limits.context
    blocks = [0] * -(-context // limits.block_size)
    chunk = Chunk([0], context - 1, blocks, [0])
    try:
        if bundle.graphs.decoder is None:
            chunk = Chunk([0] * context, 0, (), (), hidden_at=range(context))
        elif bundle.graphs.encoder is not None:
            session.encode([Source([0] * context, blocks)])
            chunk = chunk._replace(source_blocks=blocks, source_length=context)
        session.step([chunk])
    except MemoryError:
        raise
    except Exception as error:  # the runtime has no class for these
        raise StartError(
            f"{bundle.directory} says that its context is {bundle.manifest.sizes.context} tokens, "
            f"and its graphs can't run with {context}. Try a smaller --context, or export the "
            f"bundle again. {first_line(error)}"
        ) from error


def _check(bundle: Bundle, limits: Limits) -> None:
    if bundle.manifest.family == "seq2seq" and bundle.manifest.special_tokens.bos is None:
        raise StartError(
            f"{bundle.directory} holds a translation model and doesn't say which token its answers "
            "begin after. Export it again from a checkpoint with a bos token"
        )
    if bundle.graphs.device != "cpu" and bundle.manifest.family != "causal":
        raise StartError(f"{only_on_cpu(bundle.manifest.family)}. Use --device cpu")
    most = bundle.manifest.sizes.context
    if not 2 <= limits.context <= most:
        raise StartError(f"the context is {limits.context}; it must be from 2 to {most}")
    if limits.max_num_seqs < 1:
        raise StartError(f"--max-num-seqs is {limits.max_num_seqs}; it must be at least 1")
