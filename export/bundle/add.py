"""Adds graphs to an existing bundle, whose files stay byte for byte.

Knows: when two exports are of one model, how files are carried over without copying them.
Does not know: how graphs are made.
"""

import hashlib
import json
import os
import shutil
from dataclasses import fields
from pathlib import Path

from quill.export.bundle.manifest import Manifest, check_files
from quill.export.errors import BundleError
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.checkpoint.tensors import raw_bytes

_MAY_DIFFER = {"graphs", "files", "left_out", "name"}


def fingerprint(checkpoint: Checkpoint) -> str:
    """Of the network's settings and of all weights with their names, of quantized ones the source's
    blocks: only the same model has it."""
    settings = json.dumps(checkpoint.config.to_dict(), sort_keys=True)
    digest = hashlib.sha256(f"{settings}\n".encode())
    quantized = checkpoint.quantized
    for name in sorted(checkpoint.weights):
        tensor = quantized[name].raw if name in quantized else checkpoint.weights[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def check_addable(out: Path, existing: Manifest, new: Manifest) -> None:
    """Refuses to put graphs of one model beside those of another. `new` holds no graphs yet."""
    if existing.weights_sha256 is None:
        raise BundleError(
            f"{out} was made by an older version of Quill and doesn't say from which weights, so "
            "nothing can be added to it. Export it again without --add"
        )
    if existing.onnxruntime != new.onnxruntime:
        raise BundleError(
            f"{out} was verified with ONNX Runtime {existing.onnxruntime}, and this is "
            f"{new.onnxruntime}: one bundle is verified with one version. Export it again without "
            "--add"
        )
    if existing.exporter != new.exporter:
        raise BundleError(
            f"{out} was made by another version of Quill's exporter, so nothing can be added to "
            "it: one bundle comes from one version. Export it again without --add, with all that "
            f"it shall have: --precision {','.join(existing.precisions)},…"
        )
    names = [each.name for each in fields(Manifest) if each.name not in _MAY_DIFFER]
    different = [name for name in names if getattr(existing, name) != getattr(new, name)]
    if different:
        raise BundleError(
            f"{out} was made from another checkpoint ({', '.join(different)} differ), so nothing "
            "can be added to it. Give --out another directory, or export without --add to replace "
            "it"
        )
    check_files(out, existing)


def link_files(out: Path, directory: Path, existing: Manifest) -> Manifest:
    """The existing bundle's files in another directory, without a second copy where that can be."""
    for file in existing.files:
        try:
            os.link(out / file.name, directory / file.name, follow_symlinks=True)
        except OSError:  # a file system without links
            shutil.copy2(out / file.name, directory / file.name)
    return existing
