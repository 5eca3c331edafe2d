"""Layers that emit Quill's custom operators.

Knows: quill::Linear and quill::Embedding. Does not know: how they compute (export/operators/), how
their weights are laid out (export/quantize/quill_layout.py), files.

ONNX Runtime dispatches threads for every operator, which is most of a small model's step. So one
operator computes all that belongs to a matrix: the norm before it, the rounding of its inputs, the
product, the gate or the sum after it. A layer of SmolLM2 becomes five nodes.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from quill.export.quantize.quill_layout import lay_out
from quill.model.checkpoint.quantized_weight import QuantizedWeight
from quill.model.network.attention import AttentionImplementation
from quill.model.network.config import ModelConfig
from quill.model.network.layers import EncoderLayer, FeedForward, SelfAttention

# C groups of columns · G blocks of inputs · B bytes of a record · N outputs · I inputs
# R rows · T new tokens · D model size

VERSION = 1  # of the operators: what a graph was made for


Attributes = Mapping[str, int | float]
Shape = Sequence[int | torch.SymInt]


def emit(
    operator: str,
    inputs: Sequence[Tensor | None],
    attributes: Attributes,
    *shapes: Shape,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
) -> Sequence[Tensor]:
    """Emits an operator into the graph that is traced. Outputs without a type have the last one."""
    outputs: Sequence[Tensor] = torch.onnx.ops.symbolic_multi_out(
        operator,
        inputs,
        attrs={**attributes},
        dtypes=[*dtypes, *[dtypes[-1]] * (len(shapes) - len(dtypes))],
        shapes=[list(shape) for shape in shapes],
        version=VERSION,
    )
    return outputs


class CustomLinear(nn.Module):
    """A linear layer; with gains, of what an RMS norm makes of its inputs."""

    records_CGB: Tensor
    bias_N: Tensor | None
    gains_I: Tensor | None

    def __init__(
        self, weight: QuantizedWeight, bias_N: Tensor | None = None, *, gated: bool = False
    ) -> None:
        super().__init__()
        assert not (gated and bias_N is not None)
        self.num_columns, self.num_inputs = weight.shape
        self.gated = gated
        laid_out = lay_out(weight, gated)
        self.bits, self.halves = laid_out.bits, laid_out.halves
        self.register_buffer("records_CGB", laid_out.bytes_CGB)
        self.register_buffer("bias_N", None if bias_N is None else bias_N.detach())
        self.register_buffer("gains_I", None)
        self.epsilon = 0.0

    def take_norm(self, norm: nn.Module) -> None:
        """Computes the norm as well from now on."""
        assert isinstance(norm, nn.RMSNorm)
        assert norm.eps is not None
        self.gains_I, self.epsilon = norm.weight.detach().clone(), norm.eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        num_outputs = self.num_columns // 2 if self.gated else self.num_columns
        attributes = {
            "inputs": self.num_inputs,
            "columns": self.num_columns,
            "bits": self.bits,
            "halves": int(self.halves),
            "gated": int(self.gated),
            "epsilon": self.epsilon,
        }
        inputs = [x, self.records_CGB, self.gains_I, residual, self.bias_N]
        return emit("quill::Linear", inputs, attributes, [*x.shape[:-1], num_outputs])[0]


class CustomEmbedding(nn.Module):
    """An embedding of 8-bit integers: the very bytes of the vocabulary projection, if tied."""

    records_CGB: Tensor

    def __init__(self, weight: QuantizedWeight) -> None:
        super().__init__()
        assert weight.kind == "q8_0"
        self.num_tokens, self.num_columns = weight.shape
        self.register_buffer("records_CGB", lay_out(weight).bytes_CGB)

    def forward(self, ids: Tensor) -> Tensor:
        attributes = {"inputs": self.num_columns, "columns": self.num_tokens}
        shape = [*ids.shape, self.num_columns]
        return emit("quill::Embedding", [ids, self.records_CGB], attributes, shape)[0]


def can_fuse(config: ModelConfig) -> bool:
    """Whether norms, gates and sums can move into the products: the shape of Llama."""
    return (
        config.family == "causal"
        and config.norm == "rms"
        and config.norm_placement == "pre"
        and config.activation == "swiglu"
        and not config.ff_bias
    )


class FusedLayer(nn.Module):
    """A layer whose custom linear layers compute the norms, gates and sums, too. A half of another
    shape stays as it is."""

    def __init__(self, layer: EncoderLayer) -> None:
        super().__init__()
        attention, feed_forward = layer.attention, layer.feed_forward
        self.attention: nn.Module | None = None
        if isinstance(attention, SelfAttention):
            self.qkv, self.out = _custom(attention.qkv), _custom(attention.out)
            self.qk_norm = attention.qk_norm
            self.qkv.take_norm(layer.attention_residual.norm)
        else:
            self.attention, self.attention_residual = attention, layer.attention_residual
        self.feed_forward: nn.Module | None = None
        if isinstance(feed_forward, FeedForward):
            self.up, self.down = _custom(feed_forward.up), _custom(feed_forward.down)
            self.up.take_norm(layer.feed_forward_residual.norm)
        else:
            self.feed_forward = feed_forward
            self.feed_forward_residual = layer.feed_forward_residual

    def forward(self, x_RTD: Tensor, layer: int, attn_impl: AttentionImplementation) -> Tensor:
        if (attention := self.attention) is not None:
            x_RTD = self.attention_residual(x_RTD, lambda x: attention(x, layer, attn_impl))
        else:
            attended = attn_impl.self_attention(layer, self.qk_norm(self.qkv(x_RTD)))
            x_RTD = self.out(attended, x_RTD)
        y_RTD: Tensor
        if self.feed_forward is not None:
            y_RTD = self.feed_forward_residual(x_RTD, self.feed_forward)
        else:
            y_RTD = self.down(self.up(x_RTD), x_RTD)
        return y_RTD


def _custom(layer: nn.Module) -> CustomLinear:
    assert isinstance(layer, CustomLinear)
    return layer
