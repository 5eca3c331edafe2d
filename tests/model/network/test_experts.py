"""A mixture of experts: who is chosen, what they count for, how they are kept balanced."""

import pytest
import torch
import torch.nn.functional as F

from quill.model.network.config import Experts
from quill.model.network.experts import ExpertFeedForward, expert_weights, router_scores
from tests.tiny_networks import tiny

SHAPE = tiny(16, 16, d_model=8, num_layers=1, num_heads=1, num_kv_heads=1, head_size=8, d_ff=8)
EXPERTS = Experts(number=6, per_token=2, d_expert=4)


def mixture(experts: Experts) -> ExpertFeedForward:
    torch.manual_seed(0)
    return ExpertFeedForward(SHAPE, experts)


@pytest.mark.parametrize("num_shared", [0, 2])
def test_a_token_gets_the_weighted_sum_of_its_experts(num_shared: int) -> None:
    experts = Experts(number=6, per_token=2, d_expert=4, num_shared=num_shared, scale=1.5)
    layer, x_RD = mixture(experts), torch.randn(5, 8)
    found = layer(x_RD[None])[0]
    shares = layer.router(x_RD).softmax(dim=-1)
    for x, y, share in zip(x_RD, found, shares, strict=True):
        first, second = share.topk(2).indices.tolist()
        total = share[first] + share[second]
        expected = torch.zeros(8) if layer.shared is None else layer.shared(x)
        for expert in (first, second):
            gate, value = F.linear(x, layer.up.weight[8 * expert : 8 * expert + 8]).chunk(2)
            down = layer.down.weight[8 * expert : 8 * expert + 8]
            expected = expected + 1.5 * share[expert] / total * F.linear(F.silu(gate) * value, down)
        torch.testing.assert_close(y, expected)


def test_experts_come_from_the_best_groups_only() -> None:
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.5, 0.1, 0.2]])
    alone = Experts(number=6, per_token=2, d_expert=4, groups=3, top_groups=1, group_best=1)
    assert mixture(alone).choose(scores).tolist() == [[0, 1]]
    together = Experts(number=6, per_token=2, d_expert=4, groups=3, top_groups=1, group_best=2)
    assert sorted(mixture(together).choose(scores)[0].tolist()) == [2, 3]


def test_the_balance_decides_who_is_chosen_but_not_what_they_count_for() -> None:
    experts = Experts(number=3, per_token=1, d_expert=4, scoring="sigmoid", balanced=True)
    layer, logits = mixture(experts), torch.tensor([[0.0, 0.1, -3.0]])
    scores = router_scores(logits, experts)
    assert layer.choose(scores).tolist() == [[1]]
    layer.balance_E += torch.tensor([0.0, 0.0, 1.0])
    chosen = layer.choose(scores)
    assert chosen.tolist() == [[2]]
    unnormalized = Experts(number=3, per_token=1, d_expert=4, scoring="sigmoid", normalize=False)
    torch.testing.assert_close(expert_weights(scores, chosen, unnormalized), scores[:, 2:])


def test_who_has_too_many_tokens_becomes_less_likely() -> None:
    layer = mixture(Experts(number=4, per_token=1, d_expert=4, balanced=True))
    layer.rebalance(torch.tensor([10, 2, 4, 0]), 0.5)
    assert layer.balance_E.tolist() == [-0.5, 0.5, 0.0, 0.5]


def test_only_training_counts_how_many_tokens_each_had() -> None:
    layer = mixture(Experts(number=4, per_token=2, d_expert=4, balanced=True)).eval()
    counted = []
    for training, num_tokens in ((False, 7), (True, 7), (True, 3)):
        layer.train(training)(torch.randn(1, num_tokens, 8))
        counted.append(0 if layer.load_E is None else int(layer.load_E.sum()))
    assert counted == [0, 14, 20]
