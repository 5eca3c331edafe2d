"""Reads a decoder, or Nomic's encoder, out of a GGUF file.

Knows: how parts of the file become weights.
Does not know: settings (model/importers/gguf_config.py), the container, block formats, tokenizers.
"""

from functools import partial

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from quill.model.checkpoint.checkpoint import Checkpoint, Pooling
from quill.model.checkpoint.quantized_weight import FORMATS, QuantizedWeight, Raw
from quill.model.checkpoint.tensors import Lazy, LazyTensor, Tensors
from quill.model.checkpoint.typed_values import TypedValues
from quill.model.errors import UnsupportedError
from quill.model.importers.gguf_config import (
    LONG_FACTORS,
    NAMES,
    NOMIC,
    ROTARY_FACTORS,
    SHORT_FACTORS,
    architecture_of,
    read_config,
)
from quill.model.importers.gguf_file import GgufFile
from quill.model.importers.gguf_tensors import KEPT, Source, decode, keep
from quill.model.importers.gguf_tokenizer import read_vocabulary
from quill.model.importers.tensor_layout import (
    Layout,
    Part,
    check_exponents,
    check_finite,
    check_source,
    layer_norm,
    llama_layout,
)
from quill.model.network.config import ModelConfig

_ROTARY = {ROTARY_FACTORS, LONG_FACTORS, SHORT_FACTORS}  # read with the settings
_HALVES = {
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def read_gguf(file: GgufFile) -> Checkpoint:
    """The checkpoint; its weights are read when they are asked for, out of the mapped file.
    Matrices that were quantized at the source are kept so."""
    config = read_config(file)
    embeds = config.family == "encoder"
    layout = _nomic_layout(config) if embeds else _decoder_layout(file, config)
    used = {name: info.shape for name, info in file.tensors.items() if name not in _ROTARY}
    if config.tied_embeddings:
        used.pop(f"{NAMES.projection}.weight", None)
    check_source(layout, used, str(file.path))
    vocabulary = read_vocabulary(file.metadata, config.vocab_size)
    kept = [name for name, parts in layout.items() if _is_kept(file, parts)]
    return Checkpoint(
        config=config,
        weights=Tensors({name: _values(file, parts) for name, parts in layout.items()}),
        tokenizer=vocabulary.tokenizer,
        special_tokens=vocabulary.tokenizer.special,
        prepend_bos=vocabulary.prepend_bos,
        append_eos=embeds,
        stop_ids=() if embeds else vocabulary.stop_ids,
        chat_template=vocabulary.chat_template,
        provenance=_provenance(file.metadata),
        quantized=Lazy({name: partial(_quantized, file, layout[name]) for name in kept}),
        pooling=_pooling(file.metadata) if embeds else None,
        normalize=embeds,  # as llama.cpp does; the file doesn't say
    )


def _decoder_layout(file: GgufFile, config: ModelConfig) -> Layout:
    architecture = architecture_of(file)
    names = architecture.names
    if file.metadata.get("granite.logit_scale"):
        names = names._replace(logit_scale=1 / file.metadata.number("granite.logit_scale"))
    return llama_layout(config, names, architecture.interleaved)


def _nomic_layout(config: ModelConfig) -> Layout:
    d_model, d_ff = config.d_model, config.d_ff
    layout = {
        "embedding.weight": [Part("token_embd.weight", (config.vocab_size, d_model))],
        "segment_embedding.weight": [Part("token_types.weight", (config.num_segments, d_model))],
        **layer_norm("embedding_norm", "token_embd_norm", d_model),
    }
    for index in range(config.num_encoder_layers):
        ours, theirs = f"encoder.{index}", f"blk.{index}"
        qkv = Part(f"{theirs}.attn_qkv.weight", (3 * d_model, d_model))
        up = [Part(f"{theirs}.ffn_{each}.weight", (d_ff, d_model)) for each in ("gate", "up")]
        layout |= {
            f"{ours}.attention.qkv.weight": [qkv],
            f"{ours}.attention.out.weight": [
                Part(f"{theirs}.attn_output.weight", (d_model, d_model))
            ],
            f"{ours}.feed_forward.up.weight": up,
            f"{ours}.feed_forward.down.weight": [
                Part(f"{theirs}.ffn_down.weight", (d_model, d_ff))
            ],
            **layer_norm(f"{ours}.attention_residual.norm", f"{theirs}.attn_output_norm", d_model),
            **layer_norm(
                f"{ours}.feed_forward_residual.norm", f"{theirs}.layer_output_norm", d_model
            ),
        }
    return layout


def _pooling(metadata: TypedValues) -> Pooling:
    kinds: dict[int, Pooling] = {1: "mean", 2: "first", 3: "last"}
    kind = metadata.integer(f"{NOMIC}.pooling_type")
    if kind not in kinds:
        raise UnsupportedError(
            f"the GGUF file has the pooling_type {kind}; Quill knows 1, 2 and 3: the mean, the "
            "first and the last token"
        )
    return kinds[kind]


def _is_kept(file: GgufFile, parts: list[Part]) -> bool:
    kinds = {file.tensors[part.name].kind for part in parts}
    return len(_shape(parts[0])) > 1 and kinds <= set(KEPT)


def _shape(part: Part) -> tuple[int, ...]:
    """Of a part, also where the tensor has several."""
    return part.shape if part.place is None else part.shape[1:]


def _quantized(file: GgufFile, parts: list[Part]) -> QuantizedWeight:
    sources = _sources(file, parts)
    for source in sources:
        _check_scales(source)
    return keep(sources)


def _check_scales(source: Source) -> None:
    """A block's numbers are finite if its scale and its minimum are."""
    form = FORMATS[KEPT[source.kind]]
    if form.codes:
        check_exponents(source.name, source.raw_N.reshape(-1, form.num_bytes)[:, 0])
        return
    start, num_bytes = (208, 2) if form.bits == 6 else (0, 2 if form.middle else 4)
    blocks = source.raw_N.reshape(-1, form.num_bytes)
    scales = np.ascontiguousarray(blocks[:, start : start + num_bytes]).view(np.float16)
    check_finite(source.name, torch.from_numpy(scales))


def _values(file: GgufFile, parts: list[Part]) -> LazyTensor:
    matrices = [_shape(part) for part in parts]
    shape = (sum(shape[0] for shape in matrices), *matrices[0][1:])
    kinds = {file.tensors[part.name].kind for part in parts}
    dtype = _HALVES.get(next(iter(kinds))) if len(kinds) == 1 else None

    def read() -> Tensor:
        sources = _sources(file, parts)
        if dtype is not None:
            raw = np.concatenate([source.raw_N for source in sources])
            values = torch.from_numpy(raw.reshape(-1)).view(dtype)
        else:
            values = _decoded(sources, len(shape))
        if parts[0].times != 1.0:
            values = values.float() * parts[0].times
        return check_finite(parts[0].name, values.reshape(shape))

    return LazyTensor(shape, dtype or torch.float32, read)


def _decoded(sources: list[Source], num_dimensions: int) -> Tensor:
    if num_dimensions > 1:
        return decode(*sources)
    return torch.cat([decode(source).flatten() for source in sources])


def _sources(file: GgufFile, parts: list[Part]) -> list[Source]:
    return [Source(_rows(file, part), file.tensors[part.name].kind, part.name) for part in parts]


def _rows(file: GgufFile, part: Part) -> Raw:
    """A vector's numbers are rows as well where they are put into another order."""
    if part.place is not None:
        return file.rows(part.name, part.place, part.shape[0])
    rows_N = file.rows(part.name)
    if part.order is None:
        return rows_N
    return rows_N.reshape(len(part.order), -1)[part.order].reshape(rows_N.shape)


def _provenance(metadata: TypedValues) -> dict[str, str]:
    keys = {"name": "general.name", "version": "general.version", "licence": "general.license"}
    keys |= {"author": "general.organization", "url": "general.source.url"}
    return {key: str(value) for key, name in keys.items() if (value := metadata.get(name))}
