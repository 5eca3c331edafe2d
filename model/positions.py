"""Where a token stands: sinusoidal and rotary tables, and how rotary ones turn a vector.

Knows: the formulas. Does not know: caches, batches, who asks.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from model.config import ModelConfig, RotaryScaling

# P positions · D model size · H head size · F = H / 2 frequencies


class RotaryTables(NamedTuple):
    """Cosine and sine of each position's angle for each frequency."""

    cos_PF: Tensor
    sin_PF: Tensor


def sinusoidal_table(num_positions: int, d_model: int, base: float = 10_000.0) -> Tensor:
    """Section 3.5 of the paper: sines on even columns, cosines on odd ones."""
    position_P1 = torch.arange(num_positions, dtype=torch.float64).unsqueeze(1)
    frequency_F = base ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    angle_PF = position_P1 * frequency_F
    table_PD = torch.stack((angle_PF.sin(), angle_PF.cos()), dim=2).flatten(1)
    return table_PD.to(torch.float32)


def rotary_tables(config: ModelConfig) -> RotaryTables:
    frequency_F = rotary_frequencies(config.head_size, config.rotary_base, config.rotary_scaling)
    position_P = torch.arange(config.context, dtype=torch.float32)
    angle_PF = torch.outer(position_P, frequency_F)
    return RotaryTables(angle_PF.cos(), angle_PF.sin())


def rotary_frequencies(head_size: int, base: float, scaling: RotaryScaling | None) -> Tensor:
    frequency_F = 1.0 / base ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    if scaling is None:
        return frequency_F
    if scaling.kind == "linear":
        return frequency_F / scaling.factor
    return _llama3_frequencies(frequency_F, scaling)


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
    left, right = x_BNTH.chunk(2, dim=-1)
    return torch.cat((left * cos_TF - right * sin_TF, right * cos_TF + left * sin_TF), dim=-1)
