"""Quantized weights in the layouts of Quill's custom operators, with the same values.

Knows: the records that export/operators/kernels/matrix.h and unpacked.h describe.
Does not know: graphs, compilers.

Sixteen columns are computed side by side. A record has one block of 32 inputs, or eight (K-kinds):
its scales, then its minima, if it has any, then the small integers that these are multiplied with
in each block, and at last the integers: four neighbouring inputs of each column are a step.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quill.model.checkpoint.quantized_weight import (
    BLOCK_SIZE,
    FORMATS,
    Kind,
    QuantizedWeight,
    Raw,
    Rows,
)

# N columns · I inputs · C = N / 16 groups of columns · R records along the inputs
# K blocks of a record · B bytes

COLUMNS = 16
STEPS = 8  # of a block
# By their numbers, as matrix.h counts them; one is that of records that are floats.
LAYOUTS: dict[Kind, int] = {
    **{"q4_0": 0, "q4_1": 1, "q5_0": 2, "q5_1": 3, "q8_0": 4},
    **{"q4_k": 5, "q5_k": 6, "q6_k": 7, "mxfp4": 9},
}
FLOATS = 8
InputBits = Literal[8, 16]


class OperatorWeight(NamedTuple):
    """A matrix, and how finely the inputs are rounded that an operator multiplies with it."""

    weight: QuantizedWeight
    input_bits: InputBits


def layout_bits(kind: Kind) -> float:
    """Of a weight, with its share of scales and minima."""
    of = FORMATS[kind]
    numbers = 16 * (1 if of.middle else 2) / of.size
    return of.bits + numbers + (16 / BLOCK_SIZE if of.size > BLOCK_SIZE else 0)


def lay_out(rows: Rows, gated: bool = False) -> Tensor:
    """The records. `gated`: the first half of the columns gates the second; groups alternate."""
    q_NI, numbers_NRH, integers_NGH = rows.unpack()
    num_records = numbers_NRH.shape[1]
    # What isn't a whole group of columns is filled up with zeros.
    parts = [_in_groups(numbers_NRH, num_records, gated).view(np.uint8)]
    if integers_NGH is not None:
        num_blocks = rows.format.size // BLOCK_SIZE
        small_CRKB = _in_groups(
            integers_NGH.view(np.uint8).reshape(len(q_NI), num_records, num_blocks, 2),
            num_records,
            gated,
        )
        parts.append(small_CRKB)
    fours = _grouped(q_NI, gated).view(np.uint32)  # inputs, as one number
    steps: Raw = np.ascontiguousarray(fours.swapaxes(1, 2)).view(np.uint8)
    steps_CRKsB = steps.reshape(len(steps), num_records, -1, STEPS, 4 * COLUMNS)
    packed_CRKB = _pack(np.moveaxis(steps_CRKsB, 3, 0), rows.format.bits)
    parts.append(packed_CRKB)
    flat = [part.reshape(len(steps), num_records, -1) for part in parts]
    return torch.from_numpy(np.concatenate(flat, axis=2))


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


def _grouped(columns: npt.NDArray[Any], gated: bool) -> npt.NDArray[Any]:
    """(N, …) as (C, 16, …); what is missing in the last group is zeros."""
    missing = -len(columns) % COLUMNS
    if missing:
        columns = np.pad(columns, [(0, missing)] + [(0, 0)] * (columns.ndim - 1))
    groups = columns.reshape(-1, COLUMNS, *columns.shape[1:])
    if not gated:
        return groups
    assert len(groups) % 2 == 0
    return np.stack(np.split(groups, 2), axis=1).reshape(groups.shape)


def _in_groups(columns: npt.NDArray[Any], num_records: int, gated: bool) -> npt.NDArray[Any]:
    """(N, R, …) as (C, R, …, 16)."""
    groups = _grouped(columns, gated)
    return np.ascontiguousarray(np.moveaxis(groups, 1, -1)).reshape(len(groups), num_records, -1)


def _pack(q: Raw, bits: int) -> Raw:
    """Eight steps of integers as the 64 bytes of each that unpacked.h makes them of."""
    if bits == 8:
        parts = list(q)
    elif bits == 4:
        parts = [q[i] | q[i + 4] << np.uint8(4) for i in range(4)]
    elif bits == 5:
        parts = list(q[:5])
        parts[0] = parts[0] | _moved(q[5], 0, 7, 5)
        parts[1] = parts[1] | _moved(q[5], 3, 3, 5) | _moved(q[7], 3, 1, 7)
        parts[2] = parts[2] | _moved(q[6], 0, 7, 5)
        parts[3] = parts[3] | _moved(q[6], 3, 3, 5) | _moved(q[7], 4, 1, 7)
        parts[4] = parts[4] | _moved(q[7], 0, 7, 5)
    else:
        fours = (q[:4], q[4:])
        parts = [four[i] | _moved(four[3], 4 - 2 * i, 3, 6) for four in fours for i in range(3)]
    return np.stack(parts, axis=-2)


def _moved(q: Raw, start: int, mask: int, to: int) -> Raw:
    """Some bits from `start` on, moved to `to`."""
    return (q >> np.uint8(start) & np.uint8(mask)) << np.uint8(to)
