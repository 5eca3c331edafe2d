"""Where a token stands: sinusoidal and rotary tables, and how rotary ones turn a vector.

Knows: the formulas. Does not know: caches, batches.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quill.model.network.config import ModelConfig, RotaryScaling

# P positions · D model size · H head size · F = H / 2 frequencies


class RotaryTables(NamedTuple):
    """Cosine and sine of each position's angle for each frequency."""

    cos_PF: Tensor
    sin_PF: Tensor
    local: "RotaryTables | None" = None  # of layers that see a window only, if they have their own


def sinusoidal_table(num_positions: int, d_model: int, base: float = 10_000.0) -> Tensor:
    """Section 3.5 of the paper: sines on even columns, cosines on odd ones."""
    position_P1 = torch.arange(num_positions, dtype=torch.float64).unsqueeze(1)
    frequency_F = base ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    angle_PF = position_P1 * frequency_F
    table_PD = torch.stack((angle_PF.sin(), angle_PF.cos()), dim=2).flatten(1)
    return table_PD.to(torch.float32)


def relative_buckets(config: ModelConfig, *, causal: bool) -> Tensor:
    """The bucket of each distance of a key from its query, from the farthest past on: to the query
    itself, or as far ahead. Half of the buckets are for one distance each, the others for more and
    more of them. Distances ahead have the second half of all."""
    distance_R = torch.arange(1 - config.context, 1 if causal else config.context)
    num = config.relative_buckets // (1 if causal else 2)
    exact, far_R = num // 2, distance_R.abs()
    # In float32, as T5 and MPNet were trained: on a border the rounding decides.
    ratio_R = torch.log(far_R.clamp(min=1).float() / exact)
    wide_R = exact + (ratio_R / math.log(config.relative_distance / exact) * (num - exact)).long()
    bucket_R = torch.where(far_R < exact, far_R, wide_R.clamp(max=num - 1))
    return bucket_R + num * (distance_R > 0)


def rotary_tables(config: ModelConfig) -> RotaryTables:
    size, local = config.rotary_size, None
    if config.local_rotary_base is not None:
        # Windows don't grow with the context: nothing is stretched.
        local = _tables(config.context, rotary_frequencies(size, config.local_rotary_base, None))
    scaling = config.rotary_scaling
    frequency_F = rotary_frequencies(size, config.rotary_base, scaling)
    factor = 1.0 if scaling is None else scaling.attention_factor
    return _tables(config.context, frequency_F, factor)._replace(local=local)


def _tables(context: int, frequency_F: Tensor, factor: float = 1.0) -> RotaryTables:
    position_P = torch.arange(context, dtype=torch.float32)
    angle_PF = torch.outer(position_P, frequency_F)
    return RotaryTables(angle_PF.cos() * factor, angle_PF.sin() * factor)


def tables_of(rotary: RotaryTables | None, config: ModelConfig, layer: int) -> RotaryTables | None:
    """The rotary tables of a layer; None if it has no positions."""
    if not config.is_rotary(layer):
        return None
    if rotary is not None and rotary.local is not None and config.window_of(layer):
        return rotary.local
    return rotary


def rotary_frequencies(head_size: int, base: float, scaling: RotaryScaling | None) -> Tensor:
    frequency_F = 1.0 / base ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    if scaling is None:
        return frequency_F
    if scaling.kind == "linear":
        return frequency_F / scaling.factor
    if scaling.kind == "longrope":
        return frequency_F / torch.tensor(scaling.divisors)
    if scaling.kind == "yarn":
        return _yarn_frequencies(frequency_F, base, scaling)
    return _llama3_frequencies(frequency_F, scaling)


def _yarn_frequencies(frequency_F: Tensor, base: float, scaling: RotaryScaling) -> Tensor:
    """YaRN's rule: blended between two numbers of turns in the original context, over whole
    frequencies if truncated."""
    size = 2 * len(frequency_F)

    def place(turns: float) -> float:
        return (
            size * math.log(scaling.original_context / (turns * 2 * math.pi)) / math.log(base) / 2
        )

    low, high = place(scaling.high_freq_factor), place(scaling.low_freq_factor)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    index_F = torch.arange(len(frequency_F), dtype=torch.float32)
    stretched_F = ((index_F - low) / (high - low or 0.001)).clamp(0.0, 1.0)
    return stretched_F * frequency_F / scaling.factor + (1 - stretched_F) * frequency_F


def _llama3_frequencies(frequency_F: Tensor, scaling: RotaryScaling) -> Tensor:
    """Llama 3's rule: slow frequencies are stretched, fast ones kept, those between blended."""
    turns_F = scaling.original_context * frequency_F / (2 * math.pi)
    blend_F = (turns_F - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend_F = blend_F.clamp(0.0, 1.0)
    return (1 - blend_F) * frequency_F / scaling.factor + blend_F * frequency_F


def rotate(x_BNTH: Tensor, tables: RotaryTables, first_position: int) -> Tensor:
    """Turns each pair (x[i], x[i + H/2]) by its position's angle: the rotate-half form."""
    last_position = first_position + x_BNTH.shape[2]
    cos_TF = tables.cos_PF[first_position:last_position]
    sin_TF = tables.sin_PF[first_position:last_position]
    y_BNTH: Tensor = _Rotation.apply(x_BNTH, cos_TF, sin_TF)  # type: ignore[no-untyped-call]
    return y_BNTH


class _Rotation(torch.autograd.Function):
    """A turn, whose gradient is the turn back. Written out because autograd's own way through
    chunk, four products and cat costs twice the memory traffic: 4% of a step of `tiny`."""

    @staticmethod
    def forward(ctx: Any, x_BNTH: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TF, sin_TF)
        return _turn(x_BNTH, cos_TF, sin_TF, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos_TF, sin_TF = ctx.saved_tensors
        return _turn(gradients[0], cos_TF, sin_TF, 1), None, None


def _turn(x_BNTH: Tensor, cos_TF: Tensor, sin_TF: Tensor, sign: int) -> Tensor:
    """(left, right) becomes (left cos + sign right sin, right cos - sign left sin)."""
    left, right = x_BNTH.chunk(2, dim=-1)
    y_BNTH = torch.empty(x_BNTH.shape, dtype=x_BNTH.dtype, device=x_BNTH.device)
    y_left, y_right = y_BNTH.chunk(2, dim=-1)
    torch.mul(left, cos_TF, out=y_left).addcmul_(right, sin_TF, value=sign)
    torch.mul(right, cos_TF, out=y_right).addcmul_(left, sin_TF, value=-sign)
    return y_BNTH
