"""`quill convert`: writes a model in another project's format, for other programs to run.

Knows: the targets, what to do about an output that exists. Does not know: formats.
"""

import argparse
import difflib
import errno
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from quill.export.convert.gguf_model import write_gguf
from quill.export.convert.huggingface import write_huggingface
from quill.export.convert.onnx_directory import write_onnx
from quill.export.errors import ExportError
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.importers.gguf_config import NOMIC, architecture_of
from quill.model.importers.gguf_file import GgufFile
from quill.model.importers.huggingface_directory import read_settings
from quill.model.importers.import_weights import open_checkpoint
from quill.model.sources.kinds import Source, find_source, locate


class Target(NamedTuple):
    """A format. `write` gets the architecture's name at the source, if there is one, and returns
    what it wrote, in a few words."""

    write: Callable[[Path, Checkpoint, str | None], str]
    is_file: bool = False


TARGETS = {
    "transformers": Target(write_huggingface),
    "gguf": Target(write_gguf, is_file=True),
    "onnx": Target(write_onnx),
}


def run(args: argparse.Namespace) -> None:
    target = _target(args.to)
    _check_free(args.out, target)
    source = find_source(args.source)
    checkpoint = open_checkpoint(source)
    try:
        written = target.write(args.out, checkpoint, _architecture(source))
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        raise ExportError(f"can't write {args.out}: {reason}") from error
    print(f"Converted {args.source} ({written}): {args.out}")


def _target(name: str) -> Target:
    if name in TARGETS:
        return TARGETS[name]
    near = difflib.get_close_matches(name.lower(), TARGETS, n=1)
    meant = f"Did you mean {near[0]}? " if near else ""
    raise ExportError(f"unknown target {name!r}. {meant}There are {', '.join(TARGETS)}")


def _check_free(out: Path, target: Target) -> None:
    """Nothing is ever replaced: what stands there may be the source."""
    if target.is_file and out.is_dir():
        raise ExportError(f"{out} is a directory; give --out the name of a file, such as m.gguf")
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists():
        raise ExportError(f"{out} exists, and isn't replaced. Give --out another name")


def _architecture(source: Source) -> str | None:
    """What transformers calls the source's architecture: several may compute the same."""
    if source.kind in ("checkpoint", "run"):
        return None
    path = locate(source)
    if path.is_file():
        file = GgufFile(path)
        is_nomic = file.metadata.get("general.architecture") == NOMIC
        return "NomicBertModel" if is_nomic else architecture_of(file).huggingface
    (architecture,) = read_settings(path).texts("architectures")
    return architecture
