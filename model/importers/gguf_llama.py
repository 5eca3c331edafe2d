"""Reads a Llama out of a GGUF file.

Knows: the order in which llama.cpp keeps the rows of queries and keys.
Does not know: settings (model/importers/gguf_config.py), the container, block formats, tokenizers.
"""

import numpy as np
import torch
from torch import Tensor

from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.checkpoint.quantized_weight import QuantizedWeight
from quill.model.checkpoint.typed_values import TypedValues
from quill.model.importers.gguf_config import NAMES, ROTARY_FACTORS, read_config
from quill.model.importers.gguf_file import GgufFile
from quill.model.importers.gguf_tensors import Raw, Weight, decode_rows
from quill.model.importers.gguf_tokenizer import read_vocabulary
from quill.model.importers.tensor_layout import Part, Track, check_source, llama_layout, untracked


def read_gguf(file: GgufFile, track: Track = untracked) -> Checkpoint:
    """The whole checkpoint. Source-quantized matrices are carried beside their float32 values."""
    config = read_config(file)
    layout = llama_layout(config, NAMES, interleaved=True)
    used = {name: info.shape for name, info in file.tensors.items() if name != ROTARY_FACTORS}
    if config.tied_embeddings:
        used.pop(f"{NAMES.projection}.weight", None)
    check_source(layout, used, str(file.path))
    vocabulary = read_vocabulary(file.metadata, config.vocab_size)
    weights: dict[str, Tensor] = {}
    quantized: dict[str, QuantizedWeight] = {}
    for name in track(list(layout)):
        weight = _read_weight(file, layout[name])
        weights[name] = weight.values
        if weight.quantized is not None:
            quantized[name] = weight.quantized
    return Checkpoint(
        config=config,
        weights=weights,
        tokenizer=vocabulary.tokenizer,
        special_tokens=vocabulary.tokenizer.special,
        prepend_bos=vocabulary.prepend_bos,
        stop_ids=vocabulary.stop_ids,
        chat_template=vocabulary.chat_template,
        provenance=_provenance(file.metadata),
        quantized=quantized,
    )


def _read_weight(file: GgufFile, parts: list[Part]) -> Weight:
    """Stacks the parts: still as raw bytes if they are all of one kind, so that it is kept."""
    kinds = [file.tensors[part.name].kind for part in parts]
    raws = [_unpermuted(file.rows(part.name), part.interleaved_heads) for part in parts]
    is_matrix = len(parts[0].shape) == 2
    if len(set(kinds)) == 1 and is_matrix:
        return decode_rows(np.concatenate(raws), kinds[0], parts[0].name)
    decoded = [
        decode_rows(*each) for each in zip(raws, kinds, (p.name for p in parts), strict=True)
    ]
    values = torch.cat([part.values for part in decoded])
    return Weight(values if is_matrix else values.flatten())


def _unpermuted(rows_N: Raw, num_heads: int) -> Raw:
    """llama.cpp rotates adjacent rows (0, 1), (2, 3), … together; Quill row i with i + H/2."""
    if num_heads == 0:
        return rows_N
    return rows_N.reshape(num_heads, -1, 2, rows_N.shape[1]).swapaxes(1, 2).reshape(rows_N.shape)


def _provenance(metadata: TypedValues) -> dict[str, str]:
    keys = {"name": "general.name", "version": "general.version", "licence": "general.license"}
    keys |= {"author": "general.organization", "url": "general.source.url"}
    return {key: str(value) for key, name in keys.items() if (value := metadata.get(name))}
