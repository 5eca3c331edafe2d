"""Reads the shape of a Llama out of a GGUF file.

Knows: llama.cpp's names for settings and tensors. Does not know: the container, tokenizers.
"""

import numpy as np
import torch

from quill.model.checkpoint.typed_values import TypedValues
from quill.model.errors import CheckpointError, UnsupportedError
from quill.model.importers.gguf_file import GgufFile
from quill.model.importers.gguf_tensors import decode_rows
from quill.model.importers.tensor_layout import LlamaNames
from quill.model.network.config import ModelConfig, RotaryScaling
from quill.model.network.positions import rotary_frequencies

NAMES = LlamaNames(
    embedding="token_embd",
    final_norm="output_norm",
    projection="output",
    layer="blk.{}",
    attention_norm="attn_norm",
    query="attn_q",
    key="attn_k",
    value="attn_v",
    attention_out="attn_output",
    feed_forward_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
)
ROTARY_FACTORS = "rope_freqs.weight"

_UNDERSTOOD = {
    *("vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
    *("attention.value_length", "attention.layer_norm_rms_epsilon", "rope.dimension_count"),
    *("rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"),
    # Said by old converters about themselves, or repeated from elsewhere:
    *("tensor_data_layout", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
}


def read_config(file: GgufFile) -> ModelConfig:
    metadata = file.metadata
    _check_architecture(metadata)
    d_model = metadata.integer("llama.embedding_length")
    num_heads = metadata.integer("llama.attention.head_count")
    num_layers = metadata.integer("llama.block_count")
    if num_layers > len(file.tensors):
        raise CheckpointError(
            f"{file.path} claims {num_layers} layers but has {len(file.tensors)} tensors"
        )
    head_size = metadata.integer("llama.attention.key_length", d_model // max(num_heads, 1))
    _check_head_size(metadata, head_size)
    rotary_base = metadata.number("llama.rope.freq_base", 10_000.0)
    embedding = file.tensors.get(f"{NAMES.embedding}.weight")
    return ModelConfig(
        family="causal",
        vocab_size=embedding.shape[0] if embedding else metadata.integer("llama.vocab_size"),
        context=metadata.integer("llama.context_length"),
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=metadata.integer("llama.attention.head_count_kv", num_heads),
        head_size=head_size,
        d_ff=metadata.integer("llama.feed_forward_length"),
        positions="rotary",
        norm="rms",
        activation="swiglu",
        tied_embeddings=_is_tied(file),
        norm_eps=_plain(metadata.number("llama.attention.layer_norm_rms_epsilon")),
        rotary_base=rotary_base,
        rotary_scaling=_rotary_scaling(file, head_size, rotary_base),
    )


def _check_architecture(metadata: TypedValues) -> None:
    architecture = metadata.text("general.architecture")
    if architecture != "llama":
        raise UnsupportedError(
            f"the GGUF file has the architecture {architecture!r}; Quill reads 'llama' only"
        )
    if metadata.integer("split.count", 1) > 1:
        raise UnsupportedError(
            "the GGUF file is one part of several; join them with `llama-gguf-split --merge`"
        )
    for name in metadata.names:
        setting = name.removeprefix("llama.")
        # Nought, false and empty switch a feature off: several writers spell that out.
        if name != setting and setting not in _UNDERSTOOD and metadata.get(name):
            raise UnsupportedError(
                f"the GGUF file sets {name} to {metadata.get(name)!r}; Quill doesn't know what it "
                "changes, so it can't compute what this model computes"
            )


def _check_head_size(metadata: TypedValues, head_size: int) -> None:
    for name in ("attention.value_length", "rope.dimension_count"):
        size = metadata.integer(f"llama.{name}", head_size)
        if size != head_size:
            raise UnsupportedError(
                f"the GGUF file has llama.{name} {size} with heads of {head_size}; Quill needs "
                "both to be the same"
            )


def _is_tied(file: GgufFile) -> bool:
    """The output matrix is left out, or is the embedding once more."""
    output = file.tensors.get(f"{NAMES.projection}.weight")
    embedding = file.tensors.get(f"{NAMES.embedding}.weight")
    if output is None or embedding is None:
        return True
    if (output.kind, output.shape) != (embedding.kind, embedding.shape):
        return False
    return np.array_equal(file.rows(output.name), file.rows(embedding.name))


def _plain(value: float) -> float:
    """The decimal that was meant: a float32 of 1e-5 reads as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rotary_scaling(file: GgufFile, head_size: int, rotary_base: float) -> RotaryScaling | None:
    metadata = file.metadata
    kind = metadata.text("llama.rope.scaling.type", "none")
    old_factor = metadata.number("llama.rope.scale_linear", 1.0)
    factor = metadata.number("llama.rope.scaling.factor", old_factor)
    if kind not in ("none", "linear"):
        raise UnsupportedError(
            f"the GGUF file stretches rotary positions by {kind!r}; Quill knows 'linear' and "
            "Llama 3's"
        )
    if ROTARY_FACTORS in file.tensors:
        return _llama3_scaling(file, head_size, rotary_base)
    stretches = factor != 1.0 and (kind == "linear" or old_factor != 1.0)
    return RotaryScaling(kind="linear", factor=factor) if stretches else None


def _llama3_scaling(file: GgufFile, head_size: int, rotary_base: float) -> RotaryScaling:
    """The file has a divisor for each frequency; it must be the one that Llama 3's rule gives."""
    info = file.tensors[ROTARY_FACTORS]
    factors_F = decode_rows(file.rows(info.name), info.kind, info.name).values.flatten()
    largest = float(factors_F.max())
    scaling = RotaryScaling(kind="llama3", factor=_plain(largest))
    plain_F = rotary_frequencies(head_size, rotary_base, None)
    expected_F = plain_F / rotary_frequencies(head_size, rotary_base, scaling)
    if factors_F.shape != expected_F.shape or not torch.allclose(factors_F, expected_F, rtol=1e-4):
        raise UnsupportedError(
            f"{ROTARY_FACTORS} of {file.path} isn't what Llama 3's rule gives for the factor "
            f"{largest:g}; Quill knows no other"
        )
    return scaling
