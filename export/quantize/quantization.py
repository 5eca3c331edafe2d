"""Decides, for each matrix of a checkpoint, which integers stand for it.

Knows: which weights the source already brought as integers, which need 8 bits. Does not know: how
integers are found (export/quantize/quantizers.py) or stored (export/quantize/quill_layout.py).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from quill.export.errors import UnsupportedModelError
from quill.export.quantize.quantizers import eight_bits, k_quant
from quill.export.quantize.quill_layout import in_halves_already, with_halves
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.checkpoint.quantized_weight import BLOCK_SIZE, QuantizedWeight
from quill.model.network.config import ModelConfig

EMBEDDING = "embedding.weight"
# Rows of a table that are added, not multiplied: there is no operator to gain speed with. What an
# encoder's loop over its tokens multiplies with is float32. A router decides by small differences,
# and latent attention's matrices of each head are small.
NOT_QUANTIZED = re.compile(
    r"(position|segment)_embedding\.weight|encoder\.\d+\.\d+\.state\.weight"
    r"|.*\.router\.weight|.*\.attention\.up\.weight"
)
# The vocabulary projection decides between near-equal words: 4 bits there cost the most quality.
EIGHT_BITS = (EMBEDDING, "projection.weight")
HOW = {4: "k-quant", 8: "rounded to 8 bits"}


@dataclass(frozen=True)
class Quantization:
    """The integers of every matrix, and in words where they come from."""

    weights: Mapping[str, QuantizedWeight]
    description: str
    is_source: bool  # all are the source's own: PyTorch computes with the same values


def check_quantizable(config: ModelConfig) -> None:
    """Refuses shapes whose matrices can't be cut into blocks of 32 inputs."""
    experts, latent = config.experts, config.latent
    widths = {
        "d_model": config.d_model,
        "d_ff": config.d_ff,
        "num_heads x head_size": config.num_heads * config.head_size,
    }
    if experts is not None:
        widths["d_expert"] = experts.d_expert
    if latent is not None:
        widths["num_heads x value_size"] = config.num_heads * latent.value_size
        widths["query_rank"] = latent.query_rank
    for name, width in widths.items():
        if width % BLOCK_SIZE:
            raise UnsupportedModelError(
                f"{name} is {width}; weights in integers need multiples of {BLOCK_SIZE}. "
                "Export with --precision fp32"
            )


def quantize(checkpoint: Checkpoint, bits: Literal[4, 8]) -> Quantization:
    """Takes the source's own integers where there are any: quantizing twice ruins a model."""
    check_quantizable(checkpoint.config)
    weights, num_found = {}, 0
    for name, weight_NI in checkpoint.weights.items():
        if weight_NI.ndim == 2 and not NOT_QUANTIZED.fullmatch(name):
            wide = bits == 8 or name in EIGHT_BITS
            source = checkpoint.quantized.get(name)
            kept = _widened(source) if bits == 8 or name == EMBEDDING else source
            if name == EMBEDDING and kept is not None and kept.minimum_NG is not None:
                kept = None  # rows are looked up without minima
            num_found += kept is None
            weights[name] = kept or (eight_bits if wide else k_quant)(weight_NI)
    return Quantization(
        weights=weights,
        description=_description(weights, num_found, HOW[bits]),
        is_source=num_found == 0,
    )


def _widened(source: QuantizedWeight | None) -> QuantizedWeight | None:
    """The same values with 8 bits, if they can be had so: beside minima, scales must be halves."""
    if source is None or source.bits == 8:
        return source
    values_NI = source.values_NI().to(torch.int8)
    if source.minimum_NG is None:
        return QuantizedWeight("q8_0", values_NI - 8, source.scale_NG)
    if not in_halves_already(source):
        return None
    return QuantizedWeight("q8_1", values_NI, source.scale_NG, source.minimum_NG)


def _description(weights: Mapping[str, QuantizedWeight], num_found: int, how: str) -> str:
    kinds = ", ".join(sorted({weight.kind for weight in weights.values()}))
    if num_found == 0:
        return f"the source's own values ({kinds})"
    if num_found == len(weights):
        return f"{how} ({kinds})"
    return f"the source's own values, and {how} for {num_found} matrices ({kinds})"


def in_halves(quantization: Quantization) -> Quantization:
    """With scales that Quill's own operators read faster; the source's own fit already."""
    weights = {name: with_halves(weight) for name, weight in quantization.weights.items()}
    return replace(quantization, weights=weights)


def dequantized(checkpoint: Checkpoint, quantization: Quantization) -> Checkpoint:
    """The checkpoint with the values that its integers stand for."""
    values = {name: weight.dequantize() for name, weight in quantization.weights.items()}
    return replace(checkpoint, weights=checkpoint.weights | values, quantized={})
