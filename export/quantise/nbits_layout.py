"""Quantised weights in the layout of the runtime's operators, without changing a single value.

Knows: how com.microsoft::MatMulNBits lays out integers, and what its fast kernel can't hold.
Does not know: how weights became integers (export/quantise/quantisation.py), graphs.

The fast kernel rounds x to 8 bits and multiplies with scale * (q - zero point): a small integer.
What doesn't fit goes through a narrow product in float32 beside it:

    x·wᵀ = kernel(x without outliers) + (x·select)·exact

- A block with a minimum, weight = scale * q + minimum, has an integer zero point if its minimum is
  a multiple of its scale. If not, `select` sums x over each block, and `exact` holds what a zero
  point of 8 leaves out: minimum + 8 * scale. (Float zero points would say the same, but have no
  fast kernel: 9 tokens/s against 144.)
- Inputs that are far larger than their neighbours (export/quantise/outliers.py) would spoil the
rounding of
  their whole block. `select` picks them, and `exact` holds their columns of the matrix.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from quill.model.checkpoint.quantised_weight import BLOCK_SIZE, QuantisedWeight

# N outputs · I inputs · G = I / 32 blocks along the inputs · B bytes of a block
# O outliers · C columns beside the kernel

MIDDLE_4BIT = 8  # the operator's zero points, when it is given none
MIDDLE_8BIT = 128


class Packed(NamedTuple):
    """What the operator takes."""

    q_NGB: Tensor  # uint8
    scale_NG: Tensor
    zero_points: Tensor | None


class Beside(NamedTuple):
    """What is multiplied in float32 beside the kernel."""

    select_IC: Tensor  # ones and zeros, in halves: they hold them exactly
    exact_CN: Tensor


def pack(weight: QuantisedWeight) -> Packed:
    zero_NG = integer_zero_points(weight)
    return Packed(
        q_NGB=unsigned(weight).reshape(*weight.scale_NG.shape, -1),
        scale_NG=in_halves(weight.scale_NG),
        zero_points=None if zero_NG is None else pack_zero_points(zero_NG),
    )


def beside(weight: QuantisedWeight, outliers_O: Tensor | None) -> Beside | None:
    """None if the kernel computes everything."""
    num_inputs, zero_NG = weight.shape[1], integer_zero_points(weight)
    select: list[Tensor] = []
    exact: list[Tensor] = []
    if weight.kind == "q4_1" and zero_NG is None:
        select.append(one_hot(torch.arange(num_inputs) // BLOCK_SIZE))
        exact.append(minimum_rest(weight).T)
    if outliers_O is not None:
        select.append(one_hot(outliers_O, num_inputs).T)
        exact.append(kernel_weights(weight)[:, outliers_O].T)
    return Beside(torch.cat(select, dim=1).half(), torch.cat(exact)) if select else None


def unsigned(weight: QuantisedWeight) -> Tensor:
    """The stored bytes. 4 bits are unsigned already; 8 bits move up by 128."""
    if weight.kind != "q8_0":
        return weight.q
    return (weight.q.to(torch.int16) + MIDDLE_8BIT).to(torch.uint8)


def integer_zero_points(weight: QuantisedWeight) -> Tensor | None:
    """The zero points 0–15 that say exactly what the minima say, if there are such."""
    if weight.minimum_NG is None:
        return None
    zero_NG = torch.round(-weight.minimum_NG / weight.scale_NG).nan_to_num(0).clamp(0, 15)
    exact = torch.equal(-zero_NG * weight.scale_NG, weight.minimum_NG)
    return zero_NG.to(torch.uint8) if exact else None


def pack_zero_points(zero_NG: Tensor) -> Tensor:
    """Two a byte along the blocks, the first in the low half."""
    if zero_NG.shape[1] % 2:
        zero_NG = pad(zero_NG, (0, 1))
    return zero_NG[:, 0::2] | (zero_NG[:, 1::2] << 4)


def minimum_rest(weight: QuantisedWeight) -> Tensor:
    """What a zero point of 8 leaves out of each block: minimum + 8 * scale, in (N, G)."""
    assert weight.minimum_NG is not None
    return weight.minimum_NG + MIDDLE_4BIT * weight.scale_NG


def kernel_weights(weight: QuantisedWeight) -> Tensor:
    """The matrix that the kernel multiplies with: scale * (q - zero point)."""
    q_NGB = weight.values_NI().reshape(*weight.scale_NG.shape, BLOCK_SIZE).to(torch.float32)
    zero_NG = integer_zero_points(weight)
    if zero_NG is not None:
        q_NGB = q_NGB - zero_NG.unsqueeze(-1)
    elif weight.kind != "q8_0":
        q_NGB = q_NGB - MIDDLE_4BIT
    return (q_NGB * weight.scale_NG.unsqueeze(-1)).flatten(1)


def in_halves(scale_NG: Tensor) -> Tensor:
    """Half the bytes if nothing is lost: GGUF's scales are halves. The runtime widens them once,
    when it loads the graph."""
    halves_NG = scale_NG.half()
    return halves_NG if torch.equal(halves_NG.to(scale_NG.dtype), scale_NG) else scale_NG
