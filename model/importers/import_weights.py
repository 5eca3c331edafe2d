"""`quill import`: makes a checkpoint of a GGUF file or a Hugging Face directory.

Knows: how each kind of source is read, what to do about an output that exists, what to tell the
user. Does not know: kinds (model/sources/kinds.py), formats (model/importers/gguf_llama.py,
model/importers/huggingface_directory.py).
"""

import argparse
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from quill.cache import cache_directory, code_hash
from quill.model.checkpoint.checkpoint import (
    CONFIG_FILE,
    QUANTIZED_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    Checkpoint,
    load_checkpoint,
    read_description,
    save_checkpoint,
)
from quill.model.checkpoint.tensors import Lazy, Tensors, lazy
from quill.model.errors import CheckpointError, ConfigError, SourceError
from quill.model.importers import gguf_config
from quill.model.importers.gguf_file import GgufFile
from quill.model.importers.gguf_llama import read_gguf
from quill.model.importers.huggingface_directory import read_config, read_huggingface, read_settings
from quill.model.progress import Display
from quill.model.sources.catalogue import CATALOGUE
from quill.model.sources.hashes import sha256_of
from quill.model.sources.kinds import Source, content, find_source, locate

T = TypeVar("T")
_OWN_FILES = {CONFIG_FILE, WEIGHTS_FILE, QUANTIZED_FILE, TOKENIZER_FILE}
# An import depends on all of the package `model` but these.
NOT_IMPORTER = (
    *("model/benchmarks", "model/commands.py", "model/evaluation", "model/reference"),
    "model/training",
)


@dataclass(frozen=True)
class Weights:
    """Weights that were found, and how to read them."""

    read: Callable[[], Checkpoint]
    sha256: dict[str, str]  # of each file, by name
    origin: dict[str, Any] = field(default_factory=dict)  # what is known besides the files


def run(args: argparse.Namespace) -> None:
    source = find_source(args.source)
    if source.kind in ("bundle", "checkpoint", "run"):
        raise CheckpointError(
            f"{args.source} is a {source.kind} of Quill's already: use it as it is"
        )
    out = args.out or _default_out(source)
    weights = find_weights(source)
    importer = code_hash(("model",), NOT_IMPORTER)
    existing = _existing_provenance(out)
    if existing is not None and not args.force:
        if existing.get("sha256", {}) != weights.sha256:
            raise CheckpointError(
                f"{out} holds another checkpoint, or a damaged one; give --out a new directory, or "
                "--force to replace it"
            )
        if existing.get("importer") == importer:
            print(f"{out} holds this import already; --force makes it anew")
            return
        print(f"{out} holds this import by another version of Quill: it is made anew")
    checkpoint = _read(weights, source)
    provenance = checkpoint.provenance | {"importer": importer}
    _write(out, replace(checkpoint, provenance=provenance))
    _report(args.source, out, checkpoint)


def open_checkpoint(source: Source | str | Path) -> Checkpoint:
    """Of any source but a bundle. What isn't on this machine is fetched; nothing is written."""
    if not isinstance(source, Source):
        source = find_source(str(source))
    if source.kind == "bundle":
        raise SourceError(
            f"{source.given} is a bundle: it is exported already, and has no weights to train or "
            f"look into. Serve it: quill serve {source.given}; or name what it was exported from"
        )
    if source.kind in ("checkpoint", "run"):
        return load_checkpoint(locate(source))
    return _read(find_weights(source), source)


def _default_out(source: Source) -> Path:
    if source.kind not in ("catalogue", "hub"):
        raise ConfigError(
            f"say where the checkpoint shall go: quill import {source.given} --out DIR. (To serve "
            f"it, no import is needed: quill serve {source.given})"
        )
    return cache_directory() / "checkpoints" / source.label.replace("/", "--")


def find_weights(source: Source) -> Weights:
    """What can't be read is refused before gigabytes are hashed."""
    path = locate(source)
    if path.is_file():
        file = GgufFile(path)
        gguf_config.read_config(file)
        return Weights(lambda: read_gguf(file), _sha256([path], path.parent), _origin(source))
    read_config(read_settings(path))
    hashes = _sha256(sorted(content(path)), path)
    return Weights(lambda: read_huggingface(path), hashes, _origin(source))


def _origin(source: Source) -> dict[str, Any]:
    if source.kind == "catalogue":
        model = CATALOGUE[source.given]
        package = model.package.format(n=model.first_part)
        return {"name": model.title, "package": package, "version": model.version}
    return {"name": source.label} if source.kind == "hub" else {}


def _sha256(paths: list[Path], directory: Path) -> dict[str, str]:
    names = [path.relative_to(directory).as_posix() for path in paths]
    try:
        return dict(zip(names, sha256_of(paths), strict=True))
    except OSError as error:
        raise CheckpointError(f"can't read the weights: {error}") from error


def _existing_provenance(out: Path) -> dict[str, Any] | None:
    """What the import that stands at `out` was made from and by; None if nothing stands there.

    Only an import may be replaced: never a training run, never a user's own files.
    """
    if not out.exists():
        return None
    names = {path.name for path in out.iterdir()} if out.is_dir() else {str(out)}
    if not names:
        return None
    if not names <= _OWN_FILES or not _is_checkpoint(out):
        raise CheckpointError(f"{out} holds something else; give --out a new directory")
    provenance: dict[str, Any] = read_description(out).get("provenance", {})
    return provenance if WEIGHTS_FILE in names else {}


def _is_checkpoint(path: Path) -> bool:
    try:
        return bool(read_description(path))
    except CheckpointError:
        return False


def _read(weights: Weights, source: Source) -> Checkpoint:
    checkpoint = weights.read()
    # Without the directory: it may have a user's name, and bundles are published.
    given = source.given if source.path == Path() else source.path.name
    provenance = {"source": given, "name": source.label} | checkpoint.provenance | weights.origin
    return replace(checkpoint, provenance=provenance | {"sha256": weights.sha256})


def _write(out: Path, checkpoint: Checkpoint) -> None:
    """Tensors are read one by one while they are written."""
    weights, kept, done = lazy(checkpoint.weights).entries, checkpoint.quantized, itertools.count(1)
    with Display(f"Writing {out}", len(weights)) as display:

        def counted(read: Callable[[], T]) -> Callable[[], T]:
            def count() -> T:
                display.update(next(done))
                return read()

            return count

        counted_weights = {
            name: each._replace(read=counted(each.read)) for name, each in weights.items()
        }
        quantized = Lazy({name: counted(partial(kept.__getitem__, name)) for name in kept})
        save_checkpoint(
            out, replace(checkpoint, weights=Tensors(counted_weights), quantized=quantized)
        )


def _report(name: str, out: Path, checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    num_parameters = sum(
        math.prod(entry.shape) for entry in lazy(checkpoint.weights).entries.values()
    )
    num_layers = config.num_layers or config.num_encoder_layers
    print(
        f"Imported {name}: {num_parameters:,} parameters, {num_layers} layers, context "
        f"{config.context:,}, vocabulary {config.vocab_size:,}"
    )
    if checkpoint.tokenizer is None:
        print("There is no tokenizer.json beside the weights: the model takes token ids only")
    if checkpoint.quantized:
        print(f"{len(checkpoint.quantized)} matrices are kept quantized, as they came")
    print(f"The checkpoint is in {out}")
