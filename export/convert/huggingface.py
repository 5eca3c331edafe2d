"""Writes a Hugging Face directory, which transformers opens with `from_pretrained`.

Knows: the order of its files, how the importers' layouts are run backwards. Does not know:
settings (export/convert/huggingface_settings.py), text (export/convert/text_files.py).
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quill.export.convert.huggingface_settings import Found, find_architecture
from quill.export.convert.parts import separate_all, separated
from quill.export.convert.text_files import token_ids, write_json, write_text_files
from quill.model.checkpoint.atomic import atomic_directory
from quill.model.checkpoint.checkpoint import CONFIG_FILE, WEIGHTS_FILE, Checkpoint
from quill.model.checkpoint.tensors import lazy, write_safetensors
from quill.model.checkpoint.typed_values import TypedValues
from quill.model.importers.huggingface_bert import bert_names
from quill.model.importers.huggingface_directory import layout_of
from quill.model.importers.huggingface_seq2seq import in_their_order
from quill.model.importers.tensor_layout import Layout


def write_huggingface(out: Path, checkpoint: Checkpoint, preferred: str | None) -> str:
    """Tensors are read, taken apart and written one by one. Returns the architecture."""
    found = find_architecture(checkpoint.config, preferred)
    layout = _layout(found)
    names = [part.name for parts in layout.values() for part in parts]
    with atomic_directory(out) as directory:
        read = partial(_read, layout, checkpoint.weights, found.architecture)
        tensors = separate_all(layout, read, f"Writing {out}")
        # Old versions of transformers want to know whose tensors they are: PyTorch's.
        metadata = {"format": "pt"}
        write_safetensors(directory / WEIGHTS_FILE, names, tensors, metadata)
        write_settings(directory, checkpoint, found)
        write_text_files(directory, checkpoint)
    return found.architecture


def write_settings(directory: Path, checkpoint: Checkpoint, found: Found) -> None:
    settings = {**token_ids(checkpoint), **found.settings, "dtype": _dtype(checkpoint)}
    settings["is_encoder_decoder"] = found.config.family == "seq2seq"
    write_json(directory / CONFIG_FILE, settings)


def _layout(found: Found) -> Layout:
    """Of a model that is saved with its head, if it has one."""
    names = ["transformer.wte.weight"]
    if found.config.masked_head:
        names += [bert_names(found.architecture).prefix]
    return layout_of(found.config, names, TypedValues(found.settings, CONFIG_FILE))


def _read(
    layout: Layout, weights: Mapping[str, Tensor], architecture: str, ours: str
) -> Iterator[tuple[str, Tensor]]:
    """Their tensors of one of ours. A bias that the network doesn't have is zero."""
    parts = layout[ours]
    size = sum(math.prod(part.shape) for part in parts)
    tensor = weights[ours] if ours in weights else torch.zeros(size)
    if architecture == "MarianMTModel":
        tensor = in_their_order(ours, tensor)
    return separated(parts, tensor)


def _dtype(checkpoint: Checkpoint) -> str:
    """The type of all matrices; float32 if they differ."""
    weights = lazy(checkpoint.weights)
    found = {weights.dtype(name) for name in weights if len(weights.shape(name)) > 1}
    return str(found.pop() if len(found) == 1 else torch.float32).removeprefix("torch.")
