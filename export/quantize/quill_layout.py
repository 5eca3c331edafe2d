"""Quantized weights in the layout of Quill's custom operators, with the same values.

Knows: the records that export/operators/kernels/matrix.h describes.
Does not know: graphs, compilers.

Sixteen columns are computed side by side, 32 inputs share a scale: that is a record. First come its
scales (and minima, if it has any), then its integers, four neighbouring inputs of each column in
turn. With 4 bits the inputs 16 to 31 are in the high halves of the bytes of 0 to 15.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from quill.model.checkpoint.quantized_weight import BLOCK_SIZE, QuantizedWeight

# N columns · I inputs · G = I / 32 blocks along the inputs · C = N / 16 groups of columns

COLUMNS = 16
MIDDLE_4BIT = 8
MIDDLE_8BIT = 128
MAX_ROUNDING = 2.0**-11  # of a scale that is kept in 16 bits


class Records(NamedTuple):
    """What the operators take."""

    bytes_CGB: Tensor  # uint8
    bits: int
    halves: bool  # scales and minima are kept in 16 bits


def lay_out(weight: QuantizedWeight, gated: bool = False) -> Records:
    """`gated`: the first half of the columns gates the second. Their groups alternate."""
    values_NI = weight.values_NI()
    scale_NG, minimum_NG = weight.scale_NG, weight.minimum_NG
    if weight.kind == "q4_0":
        minimum_NG = -MIDDLE_4BIT * scale_NG
    if weight.bits == 8:
        values_NI = (values_NI.to(torch.int16) + MIDDLE_8BIT).to(torch.uint8)
    heads = [_grouped(each, gated) for each in (scale_NG, minimum_NG) if each is not None]
    head_CGH = torch.cat([each.transpose(1, 2) for each in heads], dim=-1)
    halves = minimum_NG is not None and _are_halves(head_CGH)
    if halves:
        head_CGH = head_CGH.half()
    assert halves or weight.kind != "q8_1"
    body_CGB = _body(_grouped(values_NI, gated), weight.bits == 8)
    head_CGB = head_CGH.contiguous().view(torch.uint8)
    return Records(torch.cat((head_CGB, body_CGB), dim=-1).contiguous(), weight.bits, halves)


def lay_out_floats(weight_NI: Tensor) -> Tensor:
    """Numbers as they are: an input's 16 columns side by side. Columns are whole groups."""
    assert len(weight_NI) % COLUMNS == 0
    groups = weight_NI.detach().float().reshape(-1, COLUMNS, weight_NI.shape[1])
    return groups.transpose(1, 2).contiguous().view(torch.uint8).flatten()


def gated_rows(num_stacked: int, num_columns: int) -> Tensor:
    """Stacked matrices, of each of which the first half of the columns gates the second: the order
    in which their groups alternate. A stack of them can then be laid out as one matrix."""
    places = torch.arange(num_stacked * num_columns).reshape(num_stacked, 2, -1, COLUMNS)
    return places.transpose(1, 2).flatten()


def _grouped(columns: Tensor, gated: bool) -> Tensor:
    """(N, …) as (C, 16, …); what is missing in the last group is zeros."""
    columns = pad(columns, (0, 0, 0, -len(columns) % COLUMNS))
    groups = columns.reshape(-1, COLUMNS, columns.shape[1])
    if not gated:
        return groups
    assert len(groups) % 2 == 0
    first, second = groups.chunk(2)
    return torch.stack((first, second), dim=1).flatten(0, 1)


def _body(values: Tensor, is_8bit: bool) -> Tensor:
    """(C, 16, I) integers as the bytes of records."""
    num_groups = len(values)
    fours = values.reshape(num_groups, COLUMNS, -1, BLOCK_SIZE // 4, 4)
    in_turn = fours.permute(0, 2, 3, 1, 4)  # groups, blocks, fours, columns, the four
    if not is_8bit:
        low, high = in_turn.chunk(2, dim=2)
        in_turn = low | (high << 4)
    return in_turn.flatten(2)


def in_halves_already(weight: QuantizedWeight) -> bool:
    """Whether 16 bits can hold its scales and minima as they are."""
    heads = (weight.scale_NG, weight.minimum_NG)
    return all(_are_halves(each) for each in heads if each is not None)


def _are_halves(numbers: Tensor) -> bool:
    return torch.equal(numbers.half().to(numbers.dtype), numbers)


def with_halves(weight: QuantizedWeight) -> QuantizedWeight:
    """The same integers with scales and minima that 16 bits can hold, if they nearly are already.

    For weights that were quantized here: a step is then moved by less than a hundredth of itself.
    """
    if weight.minimum_NG is None:
        return weight
    scale_NG, minimum_NG = (_halved(each) for each in (weight.scale_NG, weight.minimum_NG))
    if scale_NG is None or minimum_NG is None:
        return weight
    return replace(weight, scale_NG=scale_NG, minimum_NG=minimum_NG)


def _halved(numbers: Tensor) -> Tensor | None:
    halved = numbers.half().to(numbers.dtype)
    close = (halved - numbers).abs() <= MAX_ROUNDING * numbers.abs()
    return halved if bool(close.all()) else None
