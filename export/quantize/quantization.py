"""Chooses the quantization of each matrix of a checkpoint.

Knows: which weights are quantized at the source, which need 8 bits. Does not know: the algorithms
(export/quantize/quantizers.py), the layout (export/quantize/quill_layout.py).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from quill.export.quantize.quantizers import eight_bits, k_quant
from quill.export.quantize.quill_layout import in_halves_already, with_halves
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.checkpoint.quantized_weight import QuantizedWeight

EMBEDDING = "embedding.weight"
# Tables that are added, not multiplied, gain no speed. A recurrent encoder's loop multiplies in
# float32. A router decides by small differences, and latent attention's matrices are small.
NOT_QUANTIZED = re.compile(
    r"(position|segment)_embedding\.weight|encoder\.\d+\.\d+\.state\.weight"
    r"|.*\.router\.weight|.*\.attention\.up\.weight"
)
# The vocabulary projection decides between nearly equal logits: 4 bits there cost the most quality.
EIGHT_BITS = (EMBEDDING, "projection.weight")
HOW = {4: "k-quant", 8: "rounded to 8 bits"}


@dataclass(frozen=True)
class Quantization:
    """The integers of every matrix, and a description of their origin."""

    weights: Mapping[str, QuantizedWeight]
    description: str
    is_source: bool  # all are the source's: PyTorch computes with the same values


def quantize(checkpoint: Checkpoint, bits: Literal[4, 8]) -> Quantization:
    """Keeps the source's integers where there are any: quantizing twice ruins a model."""
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
    """The same values with 8 bits, if possible: beside minima, scales must be float16."""
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
    """With float16 scales, which the custom operators read faster; a source has them already."""
    weights = {name: with_halves(weight) for name, weight in quantization.weights.items()}
    return replace(quantization, weights=weights)


def dequantized(checkpoint: Checkpoint, quantization: Quantization) -> Checkpoint:
    """The checkpoint with dequantized weights."""
    values = {name: weight.dequantize() for name, weight in quantization.weights.items()}
    return replace(checkpoint, weights=checkpoint.weights | values, quantized={})
