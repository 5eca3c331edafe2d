"""Writes a bundle, or adds to one: a directory that is whole or absent.

Knows: the files of a bundle, the order in which they come about, which precisions are kept.
Does not know: how graphs are made, verified or shown to anybody.
"""

import contextlib
import errno
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import onnxruntime
import torch

from quill.export.bundle.add import check_addable, fingerprint, link_files
from quill.export.bundle.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    Graphs,
    Manifest,
    Sizes,
    SpecialTokens,
    describe_file,
    read_manifest,
    write_manifest,
)
from quill.export.errors import BundleError, UnsupportedModelError, VerificationError
from quill.export.graph.prepare import Networks, check_exportable
from quill.export.graph.write import remove_graphs, runnable, write_graphs
from quill.export.precisions import MAX_PERPLEXITY_RATIO, PRECISIONS, Precision, family_problem
from quill.export.verify.encoder_proof import EncoderProof
from quill.export.verify.held_out import held_out
from quill.export.verify.proof import Proof, Tick
from quill.model.checkpoint.atomic import atomic_directory
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.network.config import ModelConfig
from quill.model.network.networks import make_network

Say = Callable[[str], None]
Keep = Literal["all", "proven", "best"]

# The files of any bundle.
OWN_FILE = re.compile(r"manifest\.json|tokenizer\.json|(de|en)coder\.\w+\.onnx|weights\.\w+\.bin")


class Stage(Protocol):
    """Shows what is going on while it lasts. Of `total` things, each tick says that one is done."""

    def __call__(self, title: str, total: int | None = None) -> AbstractContextManager[Tick]: ...


@contextlib.contextmanager
def quietly(title: str, total: int | None = None) -> Iterator[Tick]:
    """A stage that shows nothing."""
    yield lambda: None


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the bundle should hold."""

    precisions: tuple[Precision, ...]
    # all: each must be proven. proven: those that are. best: the first that a server would take.
    keep: Keep = "all"
    verify: bool = True
    text: Path | None = None  # to verify on; None: export/verify/held_out.py decides
    add: bool = False  # to the bundle that stands there, whose graphs are kept as they are


def write_bundle(
    out: Path,
    checkpoint: Checkpoint,
    wishes: Wishes,
    stage: Stage = quietly,
    say: Say = print,
) -> Manifest:
    """Exports, verifies, writes. When anything fails, what stood at `out` is still there."""
    check_exportable(checkpoint.config)
    out = out.resolve()  # a link stays one, and what it leads to is replaced
    check_replaceable(out)
    standing = check_standing(out, checkpoint) if wishes.add else None
    try:
        with atomic_directory(out) as directory:
            if standing is None:
                empty = describe(out.name, checkpoint)
                manifest = _save_tokenizer(directory, checkpoint, empty)
            else:
                manifest = link_files(out, directory, standing)
            manifest = _add_graphs(directory, manifest, checkpoint, wishes, stage, say)
            write_manifest(directory, manifest)
            return manifest
    except VerificationError as error:
        raise VerificationError(
            f"{error}. Nothing was written. Export another precision, or use --no-verify to look "
            "into it. If PyTorch's answers are sound, please report it with the model's config"
        ) from error
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        raise BundleError(f"can't write the bundle {out}: {reason}") from error


def check_standing(out: Path, checkpoint: Checkpoint) -> Manifest:
    """The bundle that stands there, if graphs of this checkpoint may be added to it."""
    standing = read_manifest(out)
    check_addable(out, standing, describe(out.resolve().name, checkpoint))
    return standing


def check_replaceable(out: Path) -> None:
    """Only an empty directory gives way, or a bundle that holds nothing of anybody else's."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    names = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if not {MANIFEST_FILE} < {name for name in names if OWN_FILE.fullmatch(name)}:
        raise BundleError(
            f"{out} exists and isn't a bundle, so it isn't replaced. Give --out another name"
        )
    # By their names: a bundle that is damaged, or of another version, is replaced as well.
    if others := [name for name in names if not OWN_FILE.fullmatch(name)]:
        raise BundleError(
            f"{out} holds more than its bundle ({', '.join(others[:3])}), which would be lost. "
            "Move that elsewhere, or give --out another name"
        )


def _add_graphs(
    directory: Path,
    manifest: Manifest,
    checkpoint: Checkpoint,
    wishes: Wishes,
    stage: Stage,
    say: Say,
) -> Manifest:
    """The manifest with the graphs that were made, proven and kept."""
    networks = Networks(checkpoint)
    proof = _ask_pytorch(checkpoint, wishes.text, stage) if wishes.verify else None
    for precision in wishes.precisions:
        with stage(f"{precision}: tracing and writing"):
            if problem := shape_problem(precision, checkpoint.config):
                raise UnsupportedModelError(problem)
            prepared = networks.prepare(precision)
            graphs = write_graphs(directory, precision, prepared)
        try:
            if proof is not None:
                with (
                    stage(f"{precision}: verifying", proof.num_checks(precision)) as tick,
                    runnable(directory, graphs, prepared) as here,
                ):
                    graphs = proof.prove(
                        directory, manifest.sizes, graphs, here, prepared.quantization, tick
                    )
                if wishes.keep == "best":
                    check_good(graphs)
        except VerificationError as error:
            if wishes.keep == "all" or precision == "fp32":
                raise
            say(f"Leaving {precision} out: {error}")
            remove_graphs(directory, graphs)
            manifest = replace(manifest, left_out=(*manifest.left_out, precision))
            continue
        files = tuple(describe_file(directory, name) for name in graphs.own_files)
        manifest = replace(
            manifest, graphs=(*manifest.graphs, graphs), files=(*manifest.files, *files)
        )
        if wishes.keep == "best":
            break
    return manifest


def shape_problem(precision: Precision, config: ModelConfig) -> str | None:
    """Why a model has no such graphs, in words."""
    if problem := family_problem(precision, config.family):
        return problem
    if PRECISIONS[precision].device == "cpu":
        return None
    own = {"experts": config.experts, "latent attention": config.latent}
    if found := [name for name, part in own.items() if part is not None]:
        return (
            f"a model with {' and '.join(found)} has no {precision} graphs: only Quill's own "
            "operators compute that, and they are for the CPU"
        )
    if config.window:
        return (
            f"a model with a window has no {precision} graphs: how the runtime's attention over "
            "blocks counts its tokens couldn't be tried without a card"
        )
    return None


def _ask_pytorch(checkpoint: Checkpoint, text: Path | None, stage: Stage) -> Proof | EncoderProof:
    found = held_out(checkpoint, text)
    kind = EncoderProof if checkpoint.config.family == "encoder" else Proof
    with stage("asking PyTorch what it computes", kind.num_questions(found)) as tick:
        return kind(checkpoint, found, tick)


def check_good(graphs: Graphs) -> None:
    """Refuses what no server would take by itself."""
    found = graphs.verification
    if found is not None and not graphs.is_good:
        rise = found.perplexity / found.reference_perplexity - 1
        raise VerificationError(
            f"its perplexity is {rise:.1%} above PyTorch's, and a server takes "
            f"{MAX_PERPLEXITY_RATIO - 1:.0%} at the most by itself"
        )


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
    )


def describe(name: str, checkpoint: Checkpoint) -> Manifest:
    """The manifest of a bundle that holds nothing yet."""
    special = checkpoint.special_tokens
    return Manifest(
        format_version=FORMAT_VERSION,
        name=str(checkpoint.provenance.get("name", name)),
        family=checkpoint.config.family,
        onnxruntime=onnxruntime.__version__,
        sizes=describe_sizes(checkpoint),
        special_tokens=SpecialTokens(
            bos=special.bos,
            eos=special.eos,
            pad=special.pad,
            unk=special.unk,
            mask=special.mask,
        ),
        prepend_bos=checkpoint.prepend_bos,
        append_eos=checkpoint.append_eos,
        stop_ids=checkpoint.stop_ids,
        chat_template=checkpoint.chat_template,
        generation=checkpoint.generation,
        provenance=checkpoint.provenance,
        weights_sha256=fingerprint(checkpoint.weights),
        tokenizer=None if checkpoint.tokenizer is None else TOKENIZER_FILE,
        graphs=(),
        files=(),
        pooling=checkpoint.pooling,
        normalize=checkpoint.normalize,
    )
