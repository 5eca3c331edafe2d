"""Decides, for each matrix of a checkpoint, which integers stand for it.

Knows: which weights the source already brought as integers, which need 8 bits.
Does not know: how integers are found (export/quantisers.py) or stored (export/packing.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from export.errors import UnsupportedModelError
from export.operator_layout import with_halves
from export.outliers import find_outliers
from export.quantisers import QUANTISERS, Quantiser, eight_bits
from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.quantised import BLOCK_SIZE, QuantisedWeight

EMBEDDING = "embedding.weight"
# Rows of a table that are added, not multiplied: there is no operator to gain speed with.
NOT_QUANTISED = "position_embedding.weight"
# The vocabulary projection decides between near-equal words: 4 bits there cost the most quality.
EIGHT_BITS = (EMBEDDING, "projection.weight")


@dataclass(frozen=True)
class Quantisation:
    """The integers of every matrix, and in words where they come from."""

    weights: Mapping[str, QuantisedWeight]
    outliers: Mapping[str, Tensor]  # inputs to be kept out of the rounding
    description: str
    is_source: bool  # all are the source's own: PyTorch computes with the same values


def check_quantisable(config: ModelConfig) -> None:
    """Refuses shapes whose matrices can't be cut into blocks of 32 inputs."""
    widths = {
        "d_model": config.d_model,
        "d_ff": config.d_ff,
        "num_heads x head_size": config.num_heads * config.head_size,
    }
    for name, width in widths.items():
        if width % BLOCK_SIZE:
            raise UnsupportedModelError(
                f"{name} is {width}; int4 and int8 need multiples of {BLOCK_SIZE}. "
                "Export with --precision fp32"
            )


def quantise(checkpoint: Checkpoint, quantiser: str) -> Quantisation:
    """Takes the source's own integers where there are any: quantising twice ruins a model."""
    check_quantisable(checkpoint.config)
    find = QUANTISERS[quantiser]
    weights, num_found = {}, 0
    for name, tensor in checkpoint.weights.items():
        if tensor.ndim == 2 and name != NOT_QUANTISED:
            source = _source(checkpoint, name)
            num_found += source is None
            weights[name] = source or _find(name, tensor, find)
    return Quantisation(
        weights=weights,
        outliers=find_outliers(checkpoint),
        description=_description(weights, num_found, quantiser),
        is_source=num_found == 0,
    )


def _source(checkpoint: Checkpoint, name: str) -> QuantisedWeight | None:
    source = checkpoint.quantised.get(name)
    if source is None or name != EMBEDDING or source.kind == "q8_0":
        return source
    # The operator that looks rows up is used at 8 bits only. q4_0 fits into them exactly.
    if source.kind == "q4_0":
        return QuantisedWeight("q8_0", source.values_NI().to(torch.int8) - 8, source.scale_NG)
    return None


def _find(name: str, weight_NI: Tensor, find: Quantiser) -> QuantisedWeight:
    return (eight_bits if name in EIGHT_BITS else find)(weight_NI)


def _description(weights: Mapping[str, QuantisedWeight], num_found: int, quantiser: str) -> str:
    kinds = ", ".join(sorted({weight.kind for weight in weights.values()}))
    if num_found == 0:
        return f"the source's own values ({kinds})"
    if num_found == len(weights):
        return f"{quantiser} ({kinds})"
    return f"the source's own values, and {quantiser} for {num_found} matrices ({kinds})"


def in_halves(quantisation: Quantisation) -> Quantisation:
    """With scales that Quill's own operators read faster; the source's own fit already."""
    weights = {name: with_halves(weight) for name, weight in quantisation.weights.items()}
    return replace(quantisation, weights=weights)


def dequantised(checkpoint: Checkpoint, quantisation: Quantisation) -> Checkpoint:
    """The checkpoint with the values that its integers stand for."""
    values = {name: weight.dequantise() for name, weight in quantisation.weights.items()}
    return replace(checkpoint, weights=checkpoint.weights | values, quantised={})
