"""Weights that were quantized at their source, kept exactly as they came.

Knows: three block formats of GGUF, a fourth that holds q4_1's values in whole bytes, and what they
stand for. Does not know: files, graphs.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# N outputs · I inputs · G = I / 32 blocks along the inputs

BLOCK_SIZE = 32
Kind = Literal["q4_0", "q4_1", "q8_0", "q8_1"]


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix as integers with a scale (and for q4_1 and q8_1 a minimum) for each 32 inputs.

    q4_0: weight = scale * (q - 8)      q4_1, q8_1: scale * q + minimum      q8_0: scale * q
    4-bit values are packed two a byte along the inputs, the first one in the low half.
    """

    kind: Kind
    q: Tensor  # (N, I / 2) uint8 for 4 bits, (N, I) int8 for 8 bits
    scale_NG: Tensor  # float32
    minimum_NG: Tensor | None = None  # float32

    def __post_init__(self) -> None:
        assert (self.kind in ("q4_1", "q8_1")) == (self.minimum_NG is not None)
        assert self.q.dtype == (torch.int8 if self.bits == 8 else torch.uint8)

    @property
    def bits(self) -> int:
        return 8 if self.kind in ("q8_0", "q8_1") else 4

    @property
    def shape(self) -> tuple[int, int]:
        return self.q.shape[0], self.scale_NG.shape[1] * BLOCK_SIZE

    def values_NI(self) -> Tensor:
        """The integers, one an element."""
        if self.bits == 8:
            return self.q
        return torch.stack((self.q & 15, self.q >> 4), dim=-1).flatten(1)

    def dequantize(self) -> Tensor:
        """The matrix in float32."""
        q_NGB = self.values_NI().unflatten(1, (-1, BLOCK_SIZE)).to(torch.float32)  # type: ignore[no-untyped-call]
        if self.kind == "q4_0":
            q_NGB = q_NGB - 8
        w_NGB = q_NGB * self.scale_NG.unsqueeze(-1)
        if self.minimum_NG is not None:
            w_NGB = w_NGB + self.minimum_NG.unsqueeze(-1)
        w_NI: Tensor = w_NGB.flatten(1)
        return w_NI


def in_order(weight: QuantizedWeight, rows_N: Tensor) -> QuantizedWeight:
    """The same matrix with its outputs in another order."""
    minimum_NG = None if weight.minimum_NG is None else weight.minimum_NG[rows_N]
    return QuantizedWeight(weight.kind, weight.q[rows_N], weight.scale_NG[rows_N], minimum_NG)
