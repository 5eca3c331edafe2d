"""Layers that round weights and inputs to 8 bits and multiply integers.

Knows: com.microsoft::MatMulIntegerToFloat, scales. Does not know: which layers there are.

Each output's weights have one scale, and so has each row of inputs: the kernel multiplies whole
rows of integers, which processors with VNNI do four times as fast as floats (MatMulNBits, with a
scale for every 32 inputs, gains nothing from it beyond a few rows). A row's scale depends on that
row alone, and sums of integers are exact: no row's answer can depend on its company.

Without VNNI the runtime's kernel adds pairs of products in 16 bits, and two large ones overflow. So
the server takes these graphs by itself only on processors that have it (server/device.py).
Unsigned weights wouldn't overflow, but take a kernel that is three times slower.
"""

import math

import torch
from torch import Tensor, nn

# N outputs · I inputs · B inputs of a block that are mixed

LARGEST = 127
MAX_MIXED = 64
MAX_EVEN = 5.0
ZERO = 128  # of inputs: the kernel wants them unsigned


class RoundedLinear(nn.Module):
    """A linear layer of integers."""

    q_IN: Tensor
    scale_N: Tensor
    bias_N: Tensor | None

    def __init__(self, weight_NI: Tensor, bias_N: Tensor | None = None) -> None:
        super().__init__()
        weight_NI = weight_NI.detach()
        bias_N = None if bias_N is None else bias_N.detach()
        scale_N = weight_NI.abs().amax(dim=1).clamp_min(1e-30) / LARGEST
        q_NI = (weight_NI / scale_N.unsqueeze(1)).round()
        self.num_outputs = len(weight_NI)
        self.register_buffer("q_IN", q_NI.to(torch.int8).T.contiguous())
        self.register_buffer("scale_N", scale_N)
        self.register_buffer("bias_N", bias_N)

    def forward(self, x: Tensor) -> Tensor:
        largest = self._largest(x)  # becomes 127 in each row
        y = self._multiply(_quantise(x / largest, 1.0), 1.0) * largest
        return y if self.bias_N is None else y + self.bias_N

    def _largest(self, x: Tensor) -> Tensor:
        return x.abs().amax(dim=-1, keepdim=True)

    def _multiply(self, q: Tensor, largest: float) -> Tensor:
        zero = torch.tensor(ZERO, dtype=torch.uint8)
        y: Tensor = torch.onnx.ops.symbolic(
            "com.microsoft::MatMulIntegerToFloat",
            [q, self.q_IN, torch.tensor(largest / LARGEST), self.scale_N, zero],
            dtype=torch.float32,
            shape=[*q.shape[:-1], self.num_outputs],
            version=1,
        )
        return y


class MixedLinear(RoundedLinear):
    """Mixes neighbouring inputs before it rounds them, and their weights alike.

    What a feed-forward layer's bend lets through is mostly quiet and here and there very loud. A
    Hadamard matrix spreads each loud input over its block: its rounding error falls to a tenth,
    measured on SmolLM2, for a fortieth of the layer's work.
    """

    mix_BB: Tensor

    def __init__(self, weight_NI: Tensor, bias_N: Tensor | None = None) -> None:
        mix_BB = hadamard(weight_NI.shape[1])
        super().__init__(_mixed(weight_NI.detach(), mix_BB), bias_N)
        self.register_buffer("mix_BB", mix_BB)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_mixed(x, self.mix_BB))


def hadamard(num_inputs: int) -> Tensor:
    """The largest that fits in a whole number of blocks, up to MAX_MIXED; its own inverse."""
    size = math.gcd(num_inputs, MAX_MIXED)
    mix_BB = torch.ones(1, 1)
    while len(mix_BB) < size:
        rows = torch.cat((mix_BB, mix_BB), dim=1), torch.cat((mix_BB, -mix_BB), dim=1)
        mix_BB = torch.cat(rows)
    return mix_BB / math.sqrt(size)


def _mixed(x: Tensor, mix_BB: Tensor) -> Tensor:
    blocks = x.reshape(*x.shape[:-1], -1, len(mix_BB))
    return (blocks @ mix_BB).flatten(-2)


class EvenLinear(RoundedLinear):
    """Reads what a norm without gains made of a turned stream (export/rotation.py).

    Such inputs are much like normal numbers, whatever the token. So one scale will do for all rows,
    known beforehand: hardly one in a million inputs is cut off at MAX_EVEN. Perplexity of SmolLM2
    above float32's, by MAX_EVEN: 4 +0.41%, 4.5 +0.63%, 5 +0.20%, 5.5 +0.41%, 6.5 +1.37%. Below 6
    the order is chance: it is the noise of 4,000 tokens.
    """

    def forward(self, x: Tensor) -> Tensor:
        y = self._multiply(_quantise(x, MAX_EVEN), MAX_EVEN)
        return y if self.bias_N is None else y + self.bias_N


class RoundedProjection(RoundedLinear):
    """The vocabulary projection, which may have no rows at all to project."""

    def _largest(self, x: Tensor) -> Tensor:
        # The runtime's ReduceMax (1.31.1) leaves the shape of an empty input as it was.
        return x.abs().topk(1, dim=-1).values


def _quantise(x: Tensor, largest: float) -> Tensor:
    """From -largest … largest to 1 … 255; what is beyond is cut off."""
    q: Tensor = torch.onnx.ops.symbolic(
        "QuantizeLinear",
        [x, torch.tensor(largest / LARGEST), torch.tensor(ZERO, dtype=torch.uint8)],
        dtype=torch.uint8,
        shape=list(x.shape),
        version=21,
    )
    return q
