"""Quantised weights in the layout of the runtime's operators, without changing a single value.

Knows: com.microsoft::MatMulNBits and GatherBlockQuantized, how integer blocks are laid out.
Does not know: how weights became integers (model/quantised.py, export/quantisers.py), layers.

The fast kernel multiplies with scale * (q - zero point), where the zero point is a small integer.
A block with a minimum, weight = scale * q + minimum, is that too when the minimum is a multiple of
its scale. When it isn't, the rest goes through a narrow matrix of its own:

    x·wᵀ = x·(scale * (q - 8))ᵀ + x̄·(minimum + 8 * scale)ᵀ     with x̄ the sums of x over each block

Float zero points would say the same, but have no fast kernel (9 tokens/s against 144).
"""

import torch
from torch import Tensor, nn

from model.quantised import BLOCK_SIZE, QuantisedWeight

# N outputs · I inputs · G = I / 32 blocks along the inputs · B bytes of a block

# The level at which the runtime rounds activations to 8 bits: the only fast one on a CPU.
ACCURACY_LEVEL = 4
MIDDLE_4BIT = 8  # the operator's zero points, when it is given none
MIDDLE_8BIT = 128


class PackedLinear(nn.Module):
    """A linear layer whose weights are small integers."""

    q_NGB: Tensor
    scale_NG: Tensor
    zero_points: Tensor | None
    rest_GN: Tensor | None
    sum_IG: Tensor | None
    bias_N: Tensor | None

    def __init__(self, weight: QuantisedWeight, bias_N: Tensor | None = None) -> None:
        super().__init__()
        self.num_outputs, self.num_inputs = weight.shape
        self.bits = 8 if weight.kind == "q8_0" else 4
        num_blocks = weight.scale_NG.shape[1]
        q_NGB = unsigned(weight).reshape(self.num_outputs, num_blocks, -1)
        self.register_buffer("q_NGB", q_NGB)
        self.register_buffer("scale_NG", weight.scale_NG)
        self.register_buffer("bias_N", bias_N)
        zero_points_NG = integer_zero_points(weight)
        rest = weight.kind == "q4_1" and zero_points_NG is None
        packed = None if zero_points_NG is None else pack_zero_points(zero_points_NG)
        self.register_buffer("zero_points", packed)
        self.register_buffer("rest_GN", minimum_rest(weight).T.contiguous() if rest else None)
        self.register_buffer("sum_IG", block_indicator(self.num_inputs) if rest else None)

    def forward(self, x: Tensor) -> Tensor:
        inputs = [x, self.q_NGB, self.scale_NG]
        if self.zero_points is not None:
            inputs.append(self.zero_points)
        y: Tensor = torch.onnx.ops.symbolic(
            "com.microsoft::MatMulNBits",
            inputs,
            attrs={
                "K": self.num_inputs,
                "N": self.num_outputs,
                "bits": self.bits,
                "block_size": BLOCK_SIZE,
                "accuracy_level": ACCURACY_LEVEL,
            },
            dtype=x.dtype,
            shape=[*x.shape[:-1], self.num_outputs],
            version=1,
        )
        if self.rest_GN is not None:
            assert self.sum_IG is not None
            y = y + (x @ self.sum_IG) @ self.rest_GN
        return y if self.bias_N is None else y + self.bias_N


class PackedEmbedding(nn.Module):
    """An embedding of 8-bit integers: the very bytes of the vocabulary projection, if tied."""

    q_VI: Tensor
    scale_VG: Tensor

    def __init__(self, weight: QuantisedWeight) -> None:
        super().__init__()
        assert weight.kind == "q8_0"
        self.num_columns = weight.shape[1]
        self.register_buffer("q_VI", unsigned(weight))
        self.register_buffer("scale_VG", weight.scale_NG)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = torch.onnx.ops.symbolic(
            "com.microsoft::GatherBlockQuantized",
            [self.q_VI, ids, self.scale_VG],
            attrs={"bits": 8, "block_size": BLOCK_SIZE, "gather_axis": 0, "quantize_axis": 1},
            dtype=self.scale_VG.dtype,
            shape=[*ids.shape, self.num_columns],
            version=1,
        )
        return x


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
        zero_NG = nn.functional.pad(zero_NG, (0, 1))
    return zero_NG[:, 0::2] | (zero_NG[:, 1::2] << 4)


def minimum_rest(weight: QuantisedWeight) -> Tensor:
    """What a symmetric operator leaves out: minimum + 8 * scale, in (N, G)."""
    assert weight.minimum_NG is not None
    return weight.minimum_NG + MIDDLE_4BIT * weight.scale_NG


def block_indicator(num_inputs: int) -> Tensor:
    """(I, G): one where an input belongs to a block. A product with it sums over blocks."""
    blocks_I = torch.arange(num_inputs) // BLOCK_SIZE
    return nn.functional.one_hot(blocks_I).to(torch.float32)
