"""Layers that hold small integers and write the runtime's integer operators into the graph.

Knows: com.microsoft::MatMulNBits and GatherBlockQuantized.
Does not know: how integers are laid out (export/quantise/nbits_layout.py), which layers there are.
"""

import torch
from torch import Tensor, nn

from quill.export.quantise.nbits_layout import beside, in_halves, pack, unsigned
from quill.model.checkpoint.quantised_weight import BLOCK_SIZE, QuantisedWeight

# N outputs · I inputs · G = I / 32 blocks along the inputs · B bytes of a block
# O outliers · C columns beside the kernel · V vocabulary

# The level at which the runtime rounds activations to 8 bits: the only fast one on a CPU.
ACCURACY_LEVEL = 4


class PackedLinear(nn.Module):
    """A linear layer."""

    q_NGB: Tensor
    scale_NG: Tensor
    zero_points: Tensor | None
    bias_N: Tensor | None
    keep_I: Tensor | None
    select_IC: Tensor | None
    exact_CN: Tensor | None

    def __init__(
        self,
        weight: QuantisedWeight,
        bias_N: Tensor | None = None,
        outliers_O: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.num_outputs, self.num_inputs = weight.shape
        self.bits = 8 if weight.kind == "q8_0" else 4
        for name, tensor in pack(weight)._asdict().items():
            self.register_buffer(name, tensor)
        self.register_buffer("bias_N", bias_N)
        self.register_buffer("keep_I", None)
        if outliers_O is not None:
            self.keep_I = torch.ones(self.num_inputs).index_fill(0, outliers_O, 0.0)
        exact = beside(weight, outliers_O)
        self.register_buffer("select_IC", None if exact is None else exact.select_IC)
        self.register_buffer("exact_CN", None if exact is None else exact.exact_CN)

    def forward(self, x: Tensor) -> Tensor:
        y = self._kernel(x if self.keep_I is None else x * self.keep_I)
        if self.select_IC is not None:
            assert self.exact_CN is not None
            y = y + (x @ self.select_IC.to(x.dtype)) @ self.exact_CN
        return y if self.bias_N is None else y + self.bias_N

    def _kernel(self, x: Tensor) -> Tensor:
        inputs = [x, self.q_NGB, self.scale_NG.to(x.dtype)]
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
        return y


class PackedEmbedding(nn.Module):
    """An embedding of 8-bit integers: the very bytes of the vocabulary projection, if tied."""

    q_VI: Tensor
    scale_VG: Tensor

    def __init__(self, weight: QuantisedWeight) -> None:
        super().__init__()
        assert weight.kind == "q8_0"
        self.num_columns = weight.shape[1]
        self.register_buffer("q_VI", unsigned(weight))
        self.register_buffer("scale_VG", in_halves(weight.scale_NG))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = torch.onnx.ops.symbolic(
            "com.microsoft::GatherBlockQuantized",
            [self.q_VI, ids, self.scale_VG.to(torch.float32)],
            attrs={"bits": 8, "block_size": BLOCK_SIZE, "gather_axis": 0, "quantize_axis": 1},
            dtype=torch.float32,
            shape=[*ids.shape, self.num_columns],
            version=1,
        )
        return x
