"""Layers that emit Quill's custom operators.

Knows: quill::Linear and quill::Embedding. Does not know: how they compute (export/operators/), how
their weights are laid out (export/quantize/quill_layout.py), files.

ONNX Runtime dispatches threads for every operator, which is most of a small model's step. So one
operator computes all that belongs to a matrix: the norm before it, the rounding of its inputs, the
product, the gate or the sum after it. A layer of SmolLM2 becomes five nodes.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from quill.export.quantize.quill_layout import LAYOUTS, OperatorWeight, lay_out
from quill.model.network.attention import AttentionImplementation
from quill.model.network.config import ModelConfig
from quill.model.network.layers import (
    EncoderLayer,
    FeedForward,
    SelfAttention,
    ShortConvolution,
)

# C groups of columns · R records along the inputs · B bytes of a record · N outputs · I inputs
# In layers: R rows · T new tokens · D model size

VERSION = 3  # of Quill's operators: what a graph was made for

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
        version=VERSION if operator.startswith("quill::") else 1,
    )
    return outputs


class CustomLinear(nn.Module):
    """A linear layer; with gains, of what an RMS norm makes of its inputs. Rows of several kinds
    are as many operators: their outputs are concatenated, or gate each other. The outputs of finer
    rows replace those of the same rows."""

    records_CRB: Tensor  # this and the bias: of the first part
    bias_N: Tensor | None
    gains_I: Tensor | None
    finer_M: Tensor | None  # the numbers of finer rows, which are the last part

    def __init__(
        self, of: OperatorWeight, bias_N: Tensor | None = None, *, gated: bool = False
    ) -> None:
        super().__init__()
        assert not (gated and bias_N is not None)
        parts, finer = of.weight.rows(), of.weight.finer
        self.num_columns, self.num_inputs = of.weight.shape
        self.gated, self.fused = gated, gated and len(parts) == 1
        biases: list[Tensor | None] = [None] * len(parts)
        if bias_N is not None:
            biases = [*torch.split(bias_N.detach(), [len(rows.raw_Nb) for rows in parts])]
        if finer is not None:
            parts += finer.weight.rows()
            biases.append(None if bias_N is None else bias_N.detach()[finer.rows_M])
        self.columns = [len(rows.raw_Nb) for rows in parts]
        self.layouts = [LAYOUTS[rows.kind] for rows in parts]
        self.input_bits = of.input_bits
        for index, (rows, bias) in enumerate(zip(parts, biases, strict=True)):
            self.register_buffer(_name("records", index), lay_out(rows, self.fused))
            self.register_buffer(_name("bias", index), None if bias is None else bias.clone())
        self.register_buffer("finer_M", None if finer is None else finer.rows_M)
        self.register_buffer("gains_I", None)
        self.epsilon = 0.0

    def take_norm(self, norm: nn.Module) -> None:
        """Computes the norm as well from now on."""
        assert isinstance(norm, nn.RMSNorm)
        assert norm.eps is not None
        self.gains_I, self.epsilon = norm.weight.detach().clone(), norm.eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if len(self.columns) == 1:
            return self._part(0, x, residual)
        parts = [self._part(i, x, None) for i in range(len(self.columns))]
        finer = None if self.finer_M is None else parts.pop()
        y = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        if finer is not None:
            assert self.finer_M is not None
            y = y.scatter(-1, self.finer_M.expand(finer.shape), finer)
        if self.gated:
            gate, value = y.chunk(2, dim=-1)
            y = nn.functional.silu(gate) * value
        return y if residual is None else y + residual

    def _part(self, index: int, x: Tensor, residual: Tensor | None) -> Tensor:
        num_columns = self.columns[index]
        attributes = {
            "inputs": self.num_inputs,
            "columns": num_columns,
            "layout": self.layouts[index],
            "input_bits": self.input_bits,
            "gated": int(self.fused),
            "epsilon": self.epsilon,
        }
        records_CRB, bias_N = (getattr(self, _name(what, index)) for what in ("records", "bias"))
        inputs = [x, records_CRB, self.gains_I, residual, bias_N]
        shape = [*x.shape[:-1], num_columns // 2 if self.fused else num_columns]
        return emit("quill::Linear", inputs, attributes, shape)[0]


def _name(what: Literal["records", "bias"], part: int) -> str:
    """Of a buffer. The first part's are those of a matrix of one kind."""
    suffix = "CRB" if what == "records" else "N"
    return f"{what}_{part}_{suffix}" if part else f"{what}_{suffix}"


class CustomEmbedding(nn.Module):
    """An embedding in any layout: the very bytes of the vocabulary projection, if tied."""

    records_CRB: Tensor
    finer: "CustomEmbedding | None"  # of some tokens
    places_V: Tensor | None  # each token's row there, or -1

    def __init__(self, of: OperatorWeight) -> None:
        super().__init__()
        (rows,), finer = of.weight.rows(), of.weight.finer
        self.num_tokens, self.num_columns = of.weight.shape
        self.layout = LAYOUTS[rows.kind]
        self.register_buffer("records_CRB", lay_out(rows))
        self.finer, places_V = None, None
        if finer is not None:
            self.finer = CustomEmbedding(of._replace(weight=finer.weight))
            places_V = torch.full((self.num_tokens,), -1, dtype=torch.int32)
            places_V[finer.rows_M] = torch.arange(len(finer.rows_M), dtype=torch.int32)
        self.register_buffer("places_V", places_V)

    def tie(self, project: CustomLinear) -> None:
        """One tensor of the graph, not two."""
        self.records_CRB = project.records_CRB
        if self.finer is not None:
            self.finer.records_CRB = getattr(project, _name("records", len(project.columns) - 1))

    def forward(self, ids: Tensor) -> Tensor:
        attributes = {"inputs": self.num_columns, "columns": self.num_tokens}
        attributes["layout"] = self.layout
        shape = [*ids.shape, self.num_columns]
        vectors = emit("quill::Embedding", [ids, self.records_CRB], attributes, shape)[0]
        if self.finer is None:
            return vectors
        assert self.places_V is not None
        places = self.places_V[ids].to(ids.dtype)
        return torch.where((places >= 0).unsqueeze(-1), self.finer(places.clamp(min=0)), vectors)


def can_fuse(config: ModelConfig) -> bool:
    """Whether norms, gates and sums can move into the products: the shape of Llama."""
    return (
        config.family == "causal"
        and config.norm == "rms"
        and config.norm_placement == "pre"
        and config.activation == "swiglu"
        and not config.ff_bias
        and not config.parallel_residual
        and config.residual_scale == 1.0
    )


class FusedLayer(nn.Module):
    """A layer whose custom linear layers compute the norms, gates and sums, too. A half of another
    shape stays as it is."""

    def __init__(self, layer: EncoderLayer) -> None:
        super().__init__()
        attention, feed_forward = layer.attention, layer.feed_forward
        self.attention: nn.Module | None = None
        self.conv: ShortConvolution | None = None
        if isinstance(attention, ShortConvolution):
            self.conv = attention
            _custom(attention.into).take_norm(layer.attention_residual.norm)
        elif isinstance(attention, SelfAttention):
            self.qkv, self.out = _custom(attention.qkv), _custom(attention.out)
            self.qk_norm, self.sinks_N = attention.qk_norm, attention.sinks_N
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
        if self.conv is not None:
            inner = self.conv.convolve(self.conv.into(x_RTD), layer, attn_impl)
            x_RTD = self.conv.out(inner, x_RTD)
        elif (attention := self.attention) is not None:
            x_RTD = self.attention_residual(x_RTD, lambda x: attention(x, layer, attn_impl))
        else:
            qkv_RTE = self.qk_norm(self.qkv(x_RTD))
            attended = attn_impl.self_attention(layer, qkv_RTE, self.sinks_N)
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
