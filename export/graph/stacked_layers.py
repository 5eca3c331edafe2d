"""Experts, the heads of latent attention and short convolutions by Quill's custom operators.

Knows: their inputs, and how many matrices of one shape are stacked. Does not know: which integers
stand for a weight, the rest of the network.

Each row needs another of the matrices; the operators put those that need the same together. The
runtime has no batch-invariant operator for it.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from quill.export.errors import UnsupportedModelError
from quill.export.graph.quill_layers import emit
from quill.export.quantize.quill_layout import (
    FLOATS,
    LAYOUTS,
    OperatorWeight,
    gated_rows,
    lay_out,
    lay_out_floats,
)
from quill.model.checkpoint.quantized_weight import Rows, in_order
from quill.model.network.attention import AttentionImplementation
from quill.model.network.experts import ExpertFeedForward
from quill.model.network.latent import LatentAttention, SplitLatentAttention
from quill.model.network.layers import EncoderLayer, ShortConvolution

# N outputs of all experts or heads · I inputs of one · E experts · D model size

Weights = Mapping[str, OperatorWeight]


class CustomExperts(nn.Module):
    """A mixture of experts. Without integers for its matrices it keeps their numbers."""

    up: Tensor
    down: Tensor
    balance_E: Tensor | None
    up_bias_N: Tensor | None
    down_bias_N: Tensor | None

    def __init__(
        self, of: ExpertFeedForward, up: OperatorWeight | None, down: OperatorWeight | None
    ) -> None:
        super().__init__()
        self.router, self.shared, self.experts = of.router, of.shared, of.experts
        order_N = gated_rows(of.experts.number, 2 * of.experts.d_expert)
        if up is None or down is None:
            self.layouts, self.input_bits = (FLOATS, FLOATS), (16, 16)
            self.register_buffer("up", lay_out_floats(of.up.weight[order_N]))
            self.register_buffer("down", lay_out_floats(of.down.weight))
        else:
            _rows(up)
            rows = _rows(up._replace(weight=in_order(up.weight, order_N))), _rows(down)
            self.layouts = LAYOUTS[rows[0].kind], LAYOUTS[rows[1].kind]
            self.input_bits = up.input_bits, down.input_bits
            self.register_buffer("up", lay_out(rows[0]))
            self.register_buffer("down", lay_out(rows[1]))
        self.register_buffer("balance_E", of.balance_E if of.experts.balanced else None)
        biases = (of.up.bias, of.down.bias) if of.experts.bias else None
        self.register_buffer("up_bias_N", biases and biases[0].detach()[order_N])
        self.register_buffer("down_bias_N", biases and biases[1].detach())

    def forward(self, x: Tensor) -> Tensor:
        experts = self.experts
        attributes: dict[str, int | float] = {
            "inputs": x.shape[-1],
            "d_expert": experts.d_expert,
            "number": experts.number,
            "per_token": experts.per_token,
            "groups": experts.groups,
            "top_groups": experts.top_groups,
            "group_best": experts.group_best,
            "sigmoid": int(experts.scoring == "sigmoid"),
            "normalize": int(experts.normalize),
            "scale": experts.scale,
            "up_layout": self.layouts[0],
            "up_input_bits": self.input_bits[0],
            "down_layout": self.layouts[1],
            "down_input_bits": self.input_bits[1],
        }
        inputs = [x, self.router(x), self.up, self.down, self.balance_E]
        # Omitted where they are the default: older versions of the operator don't know them.
        if experts.bias:
            inputs += [self.up_bias_N, self.down_bias_N]
        if experts.clamp:
            attributes |= {"clamp": experts.clamp, "slope": experts.slope}
        y = emit("quill::Experts", inputs, attributes, x.shape)[0]
        return y if self.shared is None else y + self.shared(x)


def _rows(of: OperatorWeight) -> Rows:
    rows = of.weight.rows()
    if len(rows) > 1:
        raise UnsupportedModelError(
            f"the matrices of experts are of several kinds ({of.weight.kind}); Quill's operator "
            "takes one. Use a file with one kind for all experts, or export with --precision fp32"
        )
    return rows[0]


class CustomHeadLinear(nn.Module):
    """A matrix of floats for each head."""

    records: Tensor

    def __init__(self, weight_HIO: Tensor) -> None:
        super().__init__()
        self.num_heads, self.num_inputs, self.num_columns = weight_HIO.shape
        self.register_buffer("records", lay_out_floats(weight_HIO.transpose(1, 2).flatten(0, 1)))

    def forward(self, x: Tensor) -> Tensor:
        attributes = {"heads": self.num_heads, "inputs": self.num_inputs}
        attributes["columns"] = self.num_columns
        shape = [*x.shape[:-1], self.num_heads * self.num_columns]
        return emit("quill::HeadLinear", [x, self.records], attributes, shape)[0]


class CustomShortConvolution(ShortConvolution):
    """With its weights in the operator's order."""

    kernel_LD: Tensor

    def __init__(self, of: ShortConvolution) -> None:
        nn.Module.__init__(self)
        self.into, self.out, self.bias_D = of.into, of.out, of.bias_D
        self.register_buffer("kernel_LD", of.kernel_DL.detach().t().contiguous())

    def convolve(self, x: Tensor, layer: int, attn_impl: AttentionImplementation) -> Tensor:
        before, after, value = x.chunk(3, dim=-1)
        return after * attn_impl.short_conv(layer, before * value, self.kernel_LD, self.bias_D)


def stacked_tensors(layer: EncoderLayer, *, floats: bool) -> list[str]:
    """The weights whose numbers `stack_operators` needs. `floats`: experts keep their numbers."""
    names = ["attention.up.weight"] if isinstance(layer.attention, LatentAttention) else []
    if isinstance(layer.attention, ShortConvolution):
        names.append("attention.kernel_DL")
    if floats and isinstance(layer.feed_forward, ExpertFeedForward):
        names += ["feed_forward.up.weight", "feed_forward.down.weight"]
    return names


def stack_operators(name: str, layer: EncoderLayer, weights: Weights | None = None) -> None:
    """Swaps experts, latent attention and convolutions, in place. Without integers they keep their
    numbers."""
    if isinstance(layer.attention, ShortConvolution):
        layer.attention = CustomShortConvolution(layer.attention)
    if isinstance(layer.attention, LatentAttention):
        of = layer.attention
        keys, values = CustomHeadLinear(of.key_NUC), CustomHeadLinear(of.value_NCV)
        layer.attention = SplitLatentAttention(of, keys, values)
    if isinstance(layer.feed_forward, ExpertFeedForward):
        up, down = (
            None if weights is None else weights[f"{name}.feed_forward.{part}.weight"]
            for part in ("up", "down")
        )
        layer.feed_forward = CustomExperts(layer.feed_forward, up, down)
