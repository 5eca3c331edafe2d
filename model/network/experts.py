"""A mixture of experts in the place of a feed-forward.

Knows: routers, how experts are chosen and balanced. Does not know: layers, training's steps.

The experts' matrices are stacked along their outputs, as if they were one layer's: so they are
stored, quantized and imported as any other matrix is.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quill.model.network.config import Experts, ModelConfig
from quill.model.network.layers import FeedForward

# R tokens · E experts · K experts of a token · D model size · F feed-forward size of an expert


class ExpertFeedForward(nn.Module):
    """A few experts for each token, chosen by a router, and those that all tokens share."""

    balance_E: Tensor

    def __init__(self, config: ModelConfig, experts: Experts) -> None:
        super().__init__()
        self.experts = experts
        number, d_expert, d_model = experts.number, experts.d_expert, config.d_model
        self.router = nn.Linear(d_model, number, bias=experts.bias)
        self.up = nn.Linear(d_model, number * 2 * d_expert, bias=experts.bias)
        self.down = nn.Linear(d_expert, number * d_model, bias=experts.bias)
        self.shared = None
        if experts.num_shared:
            kind = GatedFeedForward if experts.shared_gate else FeedForward
            self.shared = kind(config, experts.num_shared * d_expert)
        if experts.balanced:
            self.register_buffer("balance_E", torch.zeros(number))
        self.load_E: Tensor | None = None  # tokens of each expert, counted while training

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_RD = x_BTD.flatten(0, -2)
        y_BTD = self._chosen(x_RD).view_as(x_BTD)
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD)

    def _chosen(self, x_RD: Tensor) -> Tensor:
        """Each token's experts, weighted. Tokens are sorted by expert and back again, so that sums
        always have the same order."""
        scores_RE = router_scores(self.router(x_RD).float(), self.experts)
        chosen_RK = self.choose(scores_RE)
        weights_RK = expert_weights(scores_RE, chosen_RK, self.experts).to(x_RD.dtype)
        order = chosen_RK.flatten().argsort(stable=True)
        counts = chosen_RK.flatten().bincount(minlength=self.experts.number)
        if self.training and self.experts.balanced:
            self.load_E = counts if self.load_E is None else self.load_E + counts
        per_token = self.experts.per_token
        rows = x_RD.unsqueeze(1).expand(-1, per_token, -1).flatten(0, 1)[order]
        ups, downs = self._each(self.up), self._each(self.down)
        parts = [
            self._feed(part, up, down)
            for part, up, down in zip(torch.split(rows, counts.tolist()), ups, downs, strict=True)
            if len(part)
        ]
        y_RKD = torch.unflatten(torch.cat(parts)[order.argsort()], 0, (-1, per_token))
        return (y_RKD * weights_RK.unsqueeze(-1)).sum(dim=1)

    def _each(self, stacked: nn.Linear) -> list[tuple[Tensor, Tensor | None]]:
        """The matrix and the bias of each expert."""
        number = self.experts.number
        biases = [None] * number if stacked.bias is None else stacked.bias.chunk(number)
        return list(zip(stacked.weight.chunk(number), biases, strict=True))

    def _feed(
        self, x_RD: Tensor, up: tuple[Tensor, Tensor | None], down: tuple[Tensor, Tensor | None]
    ) -> Tensor:
        return F.linear(self.gated(*F.linear(x_RD, *up).chunk(2, dim=-1)), *down)

    def gated(self, gate: Tensor, value: Tensor) -> Tensor:
        if not (clamp := self.experts.clamp):
            return F.silu(gate) * value
        gate, value = gate.clamp(max=clamp), value.clamp(-clamp, clamp)
        gate = gate * torch.sigmoid(gate * self.experts.slope)
        return (value + 1) * gate

    @torch.no_grad()
    def choose(self, scores_RE: Tensor) -> Tensor:
        """Which experts each token has, the best first."""
        experts = self.experts
        if experts.balanced:
            scores_RE = scores_RE + self.balance_E
        if experts.groups > 1:
            groups_RGE = torch.unflatten(scores_RE, -1, (experts.groups, -1))
            best_RG = groups_RGE.topk(experts.group_best, dim=-1).values.sum(dim=-1)
            kept_RG = torch.zeros_like(best_RG, dtype=torch.bool)
            kept_RG.scatter_(-1, best_RG.topk(experts.top_groups, dim=-1).indices, True)
            scores_RE = groups_RGE.masked_fill(~kept_RG.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores_RE.topk(experts.per_token, dim=-1).indices

    @torch.no_grad()
    def rebalance(self, load_E: Tensor, rate: float) -> None:
        """Lowers the scores of experts with too many tokens, raises the others."""
        load_E = load_E.to(self.balance_E)
        self.balance_E += rate * torch.sign(load_E.mean() - load_E)


class GatedFeedForward(FeedForward):
    """Multiplied by the sigmoid of one number that a vector computes of the token."""

    def __init__(self, config: ModelConfig, d_ff: int) -> None:
        super().__init__(config, d_ff)
        self.gate_1D = nn.Parameter(torch.zeros(1, config.d_model))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return super().forward(x_BTD) * F.linear(x_BTD, self.gate_1D).sigmoid()


def router_scores(logits_RE: Tensor, experts: Experts) -> Tensor:
    if experts.scoring == "sigmoid":
        return logits_RE.sigmoid()
    return logits_RE.softmax(dim=-1)


def expert_weights(scores_RE: Tensor, chosen_RK: Tensor, experts: Experts) -> Tensor:
    """The weight of each of a token's experts."""
    weights_RK = scores_RE.gather(-1, chosen_RK)
    if experts.normalize:
        weights_RK = weights_RK / weights_RK.sum(dim=-1, keepdim=True)
    return weights_RK * experts.scale
