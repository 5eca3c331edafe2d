"""Writes a bundle: a directory that is whole or absent.

Knows: the files of a bundle and the order in which they come about.
Does not know: how graphs are traced, verified or shown to anybody.
"""

import errno
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime
import torch

from export.cuda_kernels import check_cuda_kernels
from export.errors import BundleError, VerificationError
from export.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    Graphs,
    Manifest,
    Precision,
    Sizes,
    SpecialTokens,
    describe_file,
    write_manifest,
)
from export.precision import (
    Prepared,
    check_exportable,
    prepare,
    prepare_own,
    prepare_packed,
    prepare_rounded,
)
from export.proof import Proof
from export.quantisation import Quantisation, in_halves, quantise
from export.tracing import trace
from export.weights_file import WeightsFile, weights_file
from model.atomic import atomic_directory
from model.checkpoint import Checkpoint
from model.transformer import Transformer

Stage = Callable[[str], AbstractContextManager[None]]  # shows what is going on while it lasts
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the bundle should hold."""

    precisions: tuple[Precision, ...]
    quantiser: str
    optional: tuple[Precision, ...] = ()  # of those: left out, in words, if they fail their proof
    verify: bool = True
    text: Path | None = None  # to verify on; None: export/held_out.py decides


def write_bundle(
    out: Path, checkpoint: Checkpoint, wishes: Wishes, stage: Stage, say: Say = print
) -> Manifest:
    """Exports, verifies, writes. When anything fails, what stood at `out` is still there."""
    check_exportable(checkpoint.config)
    check_replaceable(out)
    try:
        with atomic_directory(out) as directory:
            return _fill(directory, out.resolve().name, checkpoint, wishes, stage, say)
    except VerificationError as error:
        raise VerificationError(f"{error}. Nothing was written") from error
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        raise BundleError(f"can't write the bundle {out}: {reason}") from error


def check_replaceable(out: Path) -> None:
    """Only an empty directory or another bundle gives way to the new one."""
    if out.exists() and not (out / MANIFEST_FILE).exists():
        if out.is_dir() and not any(out.iterdir()):
            return
        raise BundleError(
            f"{out} exists and isn't a bundle, so it isn't replaced. Give --out another name"
        )


def _fill(
    directory: Path, name: str, checkpoint: Checkpoint, wishes: Wishes, stage: Stage, say: Say
) -> Manifest:
    sizes = describe_sizes(checkpoint)
    proof = None
    if wishes.verify:
        with stage("asking PyTorch what it computes"):
            proof = Proof(checkpoint, wishes.text)
    if checkpoint.tokenizer is not None:
        checkpoint.tokenizer.save(directory / TOKENIZER_FILE)
    all_graphs = []
    find_integers = functools.cache(lambda: quantise(checkpoint, wishes.quantiser))
    for precision in wishes.precisions:
        with stage(f"{precision}: tracing and writing"):
            quantisation = _quantisation(precision, find_integers)
            graphs = write_graphs(directory, checkpoint, precision, quantisation)
        try:
            if proof is not None:
                with stage(f"{precision}: verifying"):
                    graphs = proof.prove(directory, graphs, sizes, quantisation)
        except VerificationError as error:
            if precision not in wishes.optional:
                raise
            say(f"Leaving {precision} out: {error}")
            _remove(directory, graphs)
        else:
            all_graphs.append(graphs)
    manifest = describe(directory, name, checkpoint, sizes, tuple(all_graphs))
    write_manifest(directory, manifest)
    return manifest


def _remove(directory: Path, graphs: Graphs) -> None:
    for name in (graphs.decoder, graphs.encoder, graphs.weights):
        if name is not None:
            (directory / name).unlink()


def _quantisation(
    precision: Precision, find_integers: Callable[[], Quantisation]
) -> Quantisation | None:
    if precision == "quill4":
        return in_halves(find_integers())
    return find_integers() if precision == "int4" else None


def write_graphs(
    directory: Path, checkpoint: Checkpoint, precision: Precision, quantisation: Quantisation | None
) -> Graphs:
    """Traces the network in one precision and writes its graphs and their weights."""
    prepared = _prepare(checkpoint, precision, quantisation)
    is_seq2seq = checkpoint.config.family == "seq2seq"
    graphs = Graphs(
        precision=precision,
        device="cuda" if precision == "fp16" else "cpu",
        decoder=f"decoder.{precision}.onnx",
        encoder=f"encoder.{precision}.onnx" if is_seq2seq else None,
        weights=f"weights.{precision}.bin",
        cache_type="float16" if prepared.cache_dtype == torch.float16 else "float32",
        quantisation=_describe_quantisation(precision, quantisation),
        verification=None,
        invariance=None,
    )
    _write_models(directory, graphs, prepared)
    return graphs


def _prepare(
    checkpoint: Checkpoint, precision: Precision, quantisation: Quantisation | None
) -> Prepared:
    if quantisation is not None:
        prepare_quantised = prepare_own if precision == "quill4" else prepare_packed
        return prepare_quantised(checkpoint, quantisation)
    if precision == "int8":
        return prepare_rounded(checkpoint)
    return prepare(checkpoint, torch.float16 if precision == "fp16" else torch.float32)


def _describe_quantisation(precision: Precision, quantisation: Quantisation | None) -> str | None:
    if precision == "int8":
        return "weights rounded by output, activations by row"
    return None if quantisation is None else quantisation.description


def _write_models(directory: Path, graphs: Graphs, prepared: Prepared) -> None:
    with weights_file(directory / graphs.weights) as weights:
        _write_model(directory / graphs.decoder, trace(prepared.decoder()), weights, graphs)
        encoder = prepared.encoder()
        if encoder is not None and graphs.encoder is not None:
            _write_model(directory / graphs.encoder, trace(encoder), weights, graphs)
    for name in (graphs.decoder, graphs.encoder):
        if name is not None:
            onnx.checker.check_model(directory / name, full_check=True)


def _write_model(path: Path, model: ir.Model, weights: WeightsFile, graphs: Graphs) -> None:
    if graphs.device == "cuda":
        check_cuda_kernels(model)
    weights.take(model)
    ir.save(model, path)


def describe_sizes(checkpoint: Checkpoint) -> Sizes:
    config = checkpoint.config
    with torch.device("meta"):
        num_parameters = Transformer(config).num_parameters()
    return Sizes(
        vocab_size=config.vocab_size,
        context=config.context,
        d_model=config.d_model,
        num_layers=config.num_layers,
        num_encoder_layers=config.num_encoder_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        d_ff=config.d_ff,
        num_parameters=num_parameters,
    )


def describe(
    directory: Path, name: str, checkpoint: Checkpoint, sizes: Sizes, graphs: tuple[Graphs, ...]
) -> Manifest:
    special = checkpoint.special_tokens
    files = sorted(path.name for path in directory.iterdir())
    return Manifest(
        format_version=FORMAT_VERSION,
        name=str(checkpoint.provenance.get("name", name)),
        family=checkpoint.config.family,
        onnxruntime=onnxruntime.__version__,
        sizes=sizes,
        special_tokens=SpecialTokens(
            bos=special.bos, eos=special.eos, pad=special.pad, unk=special.unk
        ),
        prepend_bos=checkpoint.prepend_bos,
        stop_ids=checkpoint.stop_ids,
        chat_template=checkpoint.chat_template,
        generation=checkpoint.generation,
        provenance=checkpoint.provenance,
        tokenizer=None if checkpoint.tokenizer is None else TOKENIZER_FILE,
        graphs=graphs,
        files=tuple(describe_file(directory, file) for file in files),
    )
