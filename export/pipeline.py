"""Writes a bundle, or adds graphs to one: a directory that is whole or absent.

Knows: the files of a bundle, the order of export's stages, which precisions are kept.
Does not know: how graphs are made, verified or displayed.
"""

import contextlib
import errno
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import onnxruntime
import torch

from quill.export.bundle.add import check_addable, fingerprint, link_files
from quill.export.bundle.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    Manifest,
    Sizes,
    SpecialTokens,
    describe_file,
    read_manifest,
    write_manifest,
)
from quill.export.errors import BundleError, VerificationError
from quill.export.exportability import check_exportable
from quill.export.graph.prepare import Networks
from quill.export.graph.write import remove_graphs, runnable, write_graphs
from quill.export.precisions import Precision
from quill.export.verify.decoder_verifier import DecoderVerifier
from quill.export.verify.encoder_verifier import EncoderVerifier
from quill.export.verify.held_out import held_out
from quill.export.verify.recipe import Stage, can_calibrate, find_recipe
from quill.export.verify.verifier import Candidate, Tick, Verifier, check_default
from quill.export.version import exporter_version
from quill.model.checkpoint.atomic import atomic_directory
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.network.networks import make_network

Report = Callable[[str], None]
Keep = Literal["all", "verified", "best"]

# The files of any bundle.
BUNDLE_FILE = re.compile(
    r"manifest\.json|tokenizer\.json|(de|en)coder\.\w+\.onnx|weights\.\w+\.bin"
)


@contextlib.contextmanager
def quietly(title: str, total: int | None = None) -> Iterator[Tick]:
    """Displays nothing."""
    yield lambda: None


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What the bundle should hold."""

    precisions: tuple[Precision, ...]
    # all: each must pass verification. verified: those that pass. best: the first that a server
    # chooses by itself.
    keep: Keep = "all"
    verify: bool = True
    text: Path | None = None  # to verify on; None: export/verify/held_out.py chooses
    add: bool = False  # to the existing bundle, whose graphs stay as they are


def write_bundle(
    out: Path,
    checkpoint: Checkpoint,
    options: ExportOptions,
    stage: Stage = quietly,
    report: Report = print,
) -> Manifest:
    """Exports, verifies, writes. If a stage fails, `out` stays as it was."""
    for precision in options.precisions:
        check_exportable(checkpoint.config, precision)
    out = out.resolve()  # the target of a link is replaced, not the link
    check_replaceable(out)
    with stage("hashing the checkpoint"):
        empty = describe(out.name, checkpoint)
    existing = None
    if options.add:
        existing = read_manifest(out)
        check_addable(out, existing, empty)
    try:
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(atomic_directory(out))
            if existing is None:
                manifest = _save_tokenizer(directory, checkpoint, empty)
            else:
                manifest = link_files(out, directory, existing)
            parts = stack.enter_context(_parts_directory(out))
            manifest = _add_graphs(directory, parts, manifest, checkpoint, options, stage, report)
            write_manifest(directory, manifest)
            return manifest
    except VerificationError as error:
        raise VerificationError(
            f"{error}. Nothing was written. Export another precision, or use --no-verify to look "
            "into it. If PyTorch's output is right, please report this with the model's config"
        ) from error
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        raise BundleError(f"can't write the bundle {out}: {reason}") from error


def check_existing(out: Path, checkpoint: Checkpoint) -> Manifest:
    """The existing bundle's manifest, if graphs of this checkpoint may be added."""
    existing = read_manifest(out)
    check_addable(out, existing, describe(out.resolve().name, checkpoint))
    return existing


def check_replaceable(out: Path) -> None:
    """Raises an error unless `out` is free, empty, or a bundle without other files."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    names = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if not {MANIFEST_FILE} < {name for name in names if BUNDLE_FILE.fullmatch(name)}:
        raise BundleError(
            f"{out} exists and isn't a bundle, so it isn't replaced. Give --out another name"
        )
    # By names: a bundle that is damaged, or of another version, is replaced, too.
    if others := [name for name in names if not BUNDLE_FILE.fullmatch(name)]:
        raise BundleError(
            f"{out} holds more than its bundle ({', '.join(others[:3])}), which would be lost. "
            "Move that elsewhere, or give --out another name"
        )


def _add_graphs(
    directory: Path,
    parts: Path,
    manifest: Manifest,
    checkpoint: Checkpoint,
    options: ExportOptions,
    stage: Stage,
    report: Report,
) -> Manifest:
    """Makes, verifies and keeps each precision's graphs. Returns the manifest with them."""
    networks, recipe = Networks(checkpoint, parts), None
    if "quill4" in options.precisions and can_calibrate(checkpoint):
        recipe = find_recipe(checkpoint, parts, options.text, stage)
    verifier = _verifier(checkpoint, manifest, options.text, stage) if options.verify else None
    for precision in options.precisions:
        num_matrices = networks.num_matrices(precision)
        with stage(f"{precision}: preparing the weights", num_matrices) as tick:
            prepared = networks.prepare(precision, tick, recipe if precision == "quill4" else None)
        with stage(f"{precision}: tracing and writing"):
            graphs = write_graphs(directory, precision, prepared)
        try:
            if verifier is not None:
                num_ticks = verifier.num_ticks(precision, prepared.quantization)
                with (
                    stage(f"{precision}: verifying", num_ticks) as tick,
                    runnable(directory, graphs, prepared) as here,
                ):
                    candidate = Candidate(directory, graphs, here, prepared.quantization)
                    graphs = verifier.verify(candidate, tick)
                if options.keep == "best":
                    check_default(graphs)
        except VerificationError as error:
            if options.keep == "all" or precision == "fp32":
                raise
            report(f"Leaving {precision} out: {error}")
            remove_graphs(directory, graphs)
            manifest = replace(manifest, left_out=(*manifest.left_out, precision))
            continue
        files = tuple(describe_file(directory, name) for name in graphs.file_names)
        manifest = replace(
            manifest, graphs=(*manifest.graphs, graphs), files=(*manifest.files, *files)
        )
        if options.keep == "best":
            break
    return manifest


@contextlib.contextmanager
def _parts_directory(out: Path) -> Iterator[Path]:
    """A directory beside the bundle for matrices that are quantized already. It survives when the
    process is killed, for the next export."""
    parts = out.parent / f".{out.name}.parts"
    parts.mkdir(parents=True, exist_ok=True)
    try:
        yield parts
    except Exception:
        shutil.rmtree(parts, ignore_errors=True)
        raise
    except BaseException:
        with contextlib.suppress(OSError):
            parts.rmdir()  # if it is empty
        raise
    shutil.rmtree(parts, ignore_errors=True)


def _verifier(
    checkpoint: Checkpoint, manifest: Manifest, text: Path | None, stage: Stage
) -> Verifier:
    kind = EncoderVerifier if checkpoint.config.family == "encoder" else DecoderVerifier
    with stage("choosing the text to verify on"):
        return kind(checkpoint, manifest.sizes, held_out(checkpoint, text))


def _save_tokenizer(directory: Path, checkpoint: Checkpoint, manifest: Manifest) -> Manifest:
    if checkpoint.tokenizer is None:
        return manifest
    checkpoint.tokenizer.save(directory / TOKENIZER_FILE)
    return replace(manifest, files=(describe_file(directory, TOKENIZER_FILE),))


def describe_sizes(checkpoint: Checkpoint) -> Sizes:
    config = checkpoint.config
    num_kv_heads, key_size, value_size = config.cached
    with torch.device("meta"):
        num_parameters = make_network(config).num_parameters()
    return Sizes(
        vocab_size=config.vocab_size,
        context=config.context,
        d_model=config.d_model,
        num_layers=config.num_layers,
        num_encoder_layers=config.num_encoder_layers,
        num_heads=config.num_heads,
        num_kv_heads=num_kv_heads,
        head_size=key_size,
        d_ff=config.d_ff,
        num_parameters=num_parameters,
        num_segments=config.num_segments,
        value_size=0 if value_size == key_size else value_size,
        conv_layers=() if config.short_conv is None else config.short_conv.layers,
        num_classes=config.num_classes,
    )


def describe(name: str, checkpoint: Checkpoint) -> Manifest:
    """The manifest of a bundle without graphs."""
    return Manifest(
        format_version=FORMAT_VERSION,
        name=str(checkpoint.provenance.get("name", name)),
        family=checkpoint.config.family,
        onnxruntime=onnxruntime.__version__,
        exporter=exporter_version(),
        sizes=describe_sizes(checkpoint),
        special_tokens=SpecialTokens(**asdict(checkpoint.special_tokens)),
        prepend_bos=checkpoint.prepend_bos,
        append_eos=checkpoint.append_eos,
        stop_ids=checkpoint.stop_ids,
        chat_template=checkpoint.chat_template,
        generation=checkpoint.generation,
        provenance=checkpoint.provenance,
        weights_sha256=fingerprint(checkpoint),
        tokenizer=None if checkpoint.tokenizer is None else TOKENIZER_FILE,
        graphs=(),
        files=(),
        pooling=checkpoint.pooling,
        normalize=checkpoint.normalize,
    )
