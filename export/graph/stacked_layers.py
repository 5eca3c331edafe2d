"""Experts and the heads of latent attention by Quill's custom operators.

Knows: their inputs, and how many matrices of one shape are stacked. Does not know: which integers
stand for a weight, the rest of the network.

Each row needs another of the matrices; the operators put those that need the same together. The
runtime has no batch-invariant operator for it.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from quill.export.graph.quill_layers import emit
from quill.export.quantize.quill_layout import gated_rows, lay_out, lay_out_floats
from quill.model.checkpoint.quantized_weight import QuantizedWeight, in_order
from quill.model.network.experts import ExpertFeedForward
from quill.model.network.latent import LatentAttention
from quill.model.network.layers import EncoderLayer

# N outputs of all experts or heads · I inputs of one · E experts · D model size

FLOAT_BITS = 32
Weights = Mapping[str, QuantizedWeight]


class CustomExperts(nn.Module):
    """A mixture of experts. Without integers for its matrices it keeps their numbers."""

    up: Tensor
    down: Tensor
    balance_E: Tensor | None

    def __init__(
        self, of: ExpertFeedForward, up: QuantizedWeight | None, down: QuantizedWeight | None
    ) -> None:
        super().__init__()
        self.router, self.shared, self.experts = of.router, of.shared, of.experts
        order_N = gated_rows(of.experts.number, 2 * of.experts.d_expert)
        if up is None or down is None:
            self.bits, self.halves = FLOAT_BITS, (False, False)
            self.register_buffer("up", lay_out_floats(of.up.weight[order_N]))
            self.register_buffer("down", lay_out_floats(of.down.weight))
        else:
            laid_out = lay_out(in_order(up, order_N)), lay_out(down)
            self.bits, self.halves = laid_out[0].bits, (laid_out[0].halves, laid_out[1].halves)
            self.register_buffer("up", laid_out[0].bytes_CGB)
            self.register_buffer("down", laid_out[1].bytes_CGB)
        self.register_buffer("balance_E", of.balance_E if of.experts.balanced else None)

    def forward(self, x: Tensor) -> Tensor:
        experts = self.experts
        attributes = {
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
            "bits": self.bits,
            "up_halves": int(self.halves[0]),
            "down_halves": int(self.halves[1]),
        }
        inputs = [x, self.router(x), self.up, self.down, self.balance_E]
        y = emit("quill::Experts", inputs, attributes, x.shape)[0]
        return y if self.shared is None else y + self.shared(x)


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


class CustomLatentAttention(LatentAttention):
    """With custom operators for the projections into and out of the latent."""

    def __init__(self, of: LatentAttention) -> None:
        nn.Module.__init__(self)
        self.sizes, self.num_heads = of.sizes, of.num_heads
        for name, child in of.named_children():
            if name != "up":
                setattr(self, name, child)
        self.keys, self.values = CustomHeadLinear(of.key_NUC), CustomHeadLinear(of.value_NCV)

    def into_latent(self, nope: Tensor) -> Tensor:
        x: Tensor = self.keys(nope)
        return x

    def out_of_latent(self, found: Tensor) -> Tensor:
        x: Tensor = self.values(found)
        return x


def stack_operators(model: nn.Module, weights: Weights | None = None) -> None:
    """Swaps experts and latent attention, in place. Without integers they keep their numbers."""
    for name, layer in model.named_modules():
        if not isinstance(layer, EncoderLayer):
            continue
        if isinstance(layer.attention, LatentAttention):
            layer.attention = CustomLatentAttention(layer.attention)
        if isinstance(layer.feed_forward, ExpertFeedForward):
            up, down = (
                None if weights is None else weights[f"{name}.feed_forward.{part}.weight"]
                for part in ("up", "down")
            )
            layer.feed_forward = CustomExperts(layer.feed_forward, up, down)
