"""Turns the raw rows of a GGUF tensor into numbers.

Knows: the block formats that Quill keeps quantized; for the others, the `gguf` package.
Does not know: which tensor is which.
"""

from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from quill.model.checkpoint.quantized_weight import BLOCK_SIZE, Kind, QuantizedWeight
from quill.model.errors import UnsupportedError

# N outputs · I inputs · G = I / 32 blocks along the inputs · B the 32 values of a block

_KEPT: dict[Any, Kind] = {
    GGMLQuantizationType.Q4_0: "q4_0",
    GGMLQuantizationType.Q4_1: "q4_1",
    GGMLQuantizationType.Q8_0: "q8_0",
}
_HALF = 2  # bytes of a float16, in which scales and minima are stored

Raw = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.integer[Any]]


class Weight(NamedTuple):
    """A tensor in float32, and as its source had it if that is one of the forms we keep."""

    values: Tensor
    quantized: QuantizedWeight | None = None


def decode_rows(raw_N: Raw, kind: Any, name: str) -> Weight:
    """The numbers in raw rows of one kind. `name` is for the error message only."""
    if kind in _KEPT:
        return _unpack(raw_N, _KEPT[kind])
    try:
        values_NI = gguf.dequantize(raw_N, kind)
    except NotImplementedError as error:
        raise UnsupportedError(
            f"tensor {name} is stored as {kind.name}, which the gguf package can't turn into "
            "numbers; use a file in F32, F16, BF16, Q8_0, Q4_0, Q4_1 or another quantization"
        ) from error
    return Weight(torch.from_numpy(np.require(values_NI, np.float32, ["C", "W"])))


def _unpack(raw_N: Raw, kind: Kind) -> Weight:
    """A block is a scale, for q4_1 a minimum, then 32 integers."""
    num_numbers = 2 if kind == "q4_1" else 1
    num_bytes = num_numbers * _HALF + (BLOCK_SIZE if kind == "q8_0" else BLOCK_SIZE // 2)
    blocks_NGb = raw_N.reshape(len(raw_N), -1, num_bytes)
    numbers_NGb, q_NGb = np.split(blocks_NGb, [num_numbers * _HALF], axis=2)
    numbers_NG = numbers_NGb.copy().view(np.float16).astype(np.float32)
    scale_NG1, minimum_NG1 = numbers_NG[:, :, :1], numbers_NG[:, :, 1:]
    q_NGB: Integers = q_NGb.view(np.int8) if kind == "q8_0" else _nibbles(q_NGb)
    quantized = QuantizedWeight(
        kind=kind,
        q=_flat(q_NGB if kind == "q8_0" else _paired(q_NGB)),
        scale_NG=_flat(scale_NG1),
        minimum_NG=_flat(minimum_NG1) if kind == "q4_1" else None,
    )
    # The same as quantized.dequantize(), but numpy isn't slowed down by a busy machine: torch's
    # threads wait for one another after each step, and took 15 s where this takes 2 s.
    values_NGB = q_NGB.astype(np.float32)
    if kind == "q4_0":
        values_NGB -= 8
    values_NGB *= scale_NG1
    if kind == "q4_1":
        values_NGB += minimum_NG1
    return Weight(_flat(values_NGB), quantized)


def _nibbles(q_NGb: Raw) -> Integers:
    """The low halves of a block's bytes are its first 16 values, the high halves the others."""
    return np.concatenate((q_NGb & 15, q_NGb >> 4), axis=2)


def _paired(q_NGB: Integers) -> Integers:
    """Two values a byte, neighbours together, as QuantizedWeight has them."""
    return q_NGB[:, :, 0::2] | q_NGB[:, :, 1::2] << 4


def _flat(array_NGb: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(
        np.require(array_NGb.reshape(len(array_NGb), -1), None, ["C", "W", "O"])
    )
