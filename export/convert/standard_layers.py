"""Layers in a form that ONNX's standard operators compute with the weights as they are.

Knows: which products need matrices in another shape. Does not know: attention, graphs, files.

The tracer computes what is constant by itself. A weight that has only a stand-in while the graph is
traced (export/graph/stand_ins.py) must therefore go into its product as it is: a transposed or
divided stand-in would be computed from, and written as, a NaN.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quill.model.network.experts import ExpertFeedForward, expert_weights, router_scores
from quill.model.network.latent import LatentAttention, SplitLatentAttention
from quill.model.network.layers import EncoderLayer, ShortConvolution

# R tokens of all sequences · E experts · F feed-forward size of an expert · D model size
# N heads · I inputs · O outputs


class FlatLinear(nn.Module):
    """A matrix times a list of tokens: Gemm takes the matrix as it is, MatMul a transposed one."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = of.weight, of.bias

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x.flatten(0, -2), self.weight, self.bias)
        return y.reshape(*x.shape[:-1], y.shape[-1])


class AllExperts(nn.Module):
    """A mixture whose every expert computes every token: the weights of most are zero. ONNX has
    no operator that computes a token's own experts only."""

    down_EFD: Tensor
    bias_ED: Tensor | None

    def __init__(self, of: ExpertFeedForward) -> None:
        super().__init__()
        self.router, self.up, self.shared, self.experts = of.router, of.up, of.shared, of.experts
        number, bias = of.experts.number, of.down.bias
        down_EDF = torch.unflatten(of.down.weight.detach(), 0, (number, -1))
        self.register_buffer("down_EFD", down_EDF.transpose(1, 2).contiguous())
        bias_ED = None if bias is None else torch.unflatten(bias.detach(), 0, (number, -1))
        self.register_buffer("bias_ED", bias_ED)
        self.register_buffer("balance_E", of.balance_E if of.experts.balanced else None)
        self.choose, self.gated = of.choose, of.gated

    def forward(self, x_BTD: Tensor) -> Tensor:
        experts, x_RD = self.experts, x_BTD.flatten(0, -2)
        scores_RE = router_scores(self.router(x_RD), experts)
        chosen_RK = self.choose(scores_RE)
        weights_RK = expert_weights(scores_RE, chosen_RK, experts)
        weights_RE = torch.zeros_like(scores_RE).scatter(-1, chosen_RK, weights_RK)
        gate, value = torch.unflatten(self.up(x_RD), -1, (experts.number, -1)).chunk(2, dim=-1)
        h_ERF = (self.gated(gate, value) * weights_RE.unsqueeze(-1)).transpose(0, 1)
        y_RD = (h_ERF @ self.down_EFD).sum(dim=0)
        if self.bias_ED is not None:
            y_RD = y_RD + weights_RE @ self.bias_ED
        y_BTD = y_RD.view_as(x_BTD)
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD)


class StandardHeadLinear(nn.Module):
    """A matrix for each head."""

    weight_NIO: Tensor

    def __init__(self, weight_NIO: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight_NIO", weight_NIO.detach().contiguous())

    def forward(self, x_BTE: Tensor) -> Tensor:
        heads_BNTI = torch.unflatten(x_BTE, -1, (len(self.weight_NIO), -1)).transpose(1, 2)
        return (heads_BNTI @ self.weight_NIO).transpose(1, 2).flatten(2)


def use_standard_layers(layer: EncoderLayer) -> None:
    """Swaps a layer's matrices, in place. Experts, latent attention and convolutions must have
    their numbers."""
    if isinstance(layer.attention, LatentAttention):
        of = layer.attention
        keys, values = StandardHeadLinear(of.key_NUC), StandardHeadLinear(of.value_NCV)
        layer.attention = SplitLatentAttention(of, keys, values)
    if isinstance(layer.attention, ShortConvolution):
        kernel_D1L = layer.attention.kernel_DL.detach().unsqueeze(1).contiguous()
        layer.attention.kernel_DL = nn.Parameter(kernel_D1L, requires_grad=False)
    if isinstance(layer.feed_forward, ExpertFeedForward):
        layer.feed_forward = AllExperts(layer.feed_forward)
    flatten_products(layer)


def flatten_products(module: nn.Module) -> None:
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                setattr(parent, name, FlatLinear(child))
