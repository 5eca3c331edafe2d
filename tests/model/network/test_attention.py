"""Attention: the worked examples from the literature, and what the formula promises."""

import math

import pytest
import torch
from torch import Tensor

from quill.model.network.attention import (
    attention_weights,
    causal_mask,
    merge_heads,
    repeat_groups,
    split_heads,
)

# B sequences · N heads · K key/value heads · T queries · S keys · H head size


def rounded(rows: Tensor) -> list[list[float]]:
    return [[round(value, 2) for value in row] for row in rows.tolist()]


def test_masked_softmax_of_the_textbooks_four_by_four_scores() -> None:
    scores = torch.tensor(
        [
            [0.7, 0.1, 0.1, 0.1],
            [0.1, 0.6, 0.2, 0.1],
            [0.1, 0.3, 0.6, 0.1],
            [0.1, 0.3, 0.3, 0.3],
        ]
    )
    # With one-hot keys of size 4, the queries are the scores times the square root of 4.
    weights = attention_weights(2 * scores[None, None], torch.eye(4)[None, None], causal_mask(4, 4))
    assert rounded(weights[0, 0]) == [
        [1.0, 0.0, 0.0, 0.0],
        [0.38, 0.62, 0.0, 0.0],
        [0.26, 0.32, 0.43, 0.0],
        [0.21, 0.26, 0.26, 0.26],
    ]


def test_causal_mask_is_minus_infinity_in_the_future_alone_also_after_cached_tokens() -> None:
    inf = math.inf
    assert causal_mask(3, 3).tolist() == [[0, -inf, -inf], [0, 0, -inf], [0, 0, 0]]
    assert causal_mask(2, 4).tolist() == [[0, 0, 0, -inf], [0, 0, 0, 0]]


def test_weights_of_the_future_are_exactly_zero_however_high_their_scores() -> None:
    q = torch.ones(1, 1, 3, 4)
    k = torch.tensor([0.0, 10.0, 100.0]).view(1, 1, 3, 1).expand(1, 1, 3, 4)
    weights = attention_weights(q, k, causal_mask(3, 3))[0, 0]
    assert weights.triu(1).abs().max().item() == 0.0
    assert weights.sum(dim=1).tolist() == pytest.approx([1, 1, 1])


@pytest.mark.parametrize("d_k", [4, 64, 1024])
def test_scaling_keeps_the_variance_of_scores_near_one_as_d_k_grows(d_k: int) -> None:
    generator = torch.Generator().manual_seed(d_k)
    q, k = torch.randn(2, 1, 1, 300, d_k, generator=generator)
    weights = attention_weights(q, k)
    # log-softmax rows are the scores up to a constant of each row.
    scaled = weights.log() - weights.log().mean(dim=-1, keepdim=True)
    assert scaled.var().item() == pytest.approx(1.0, abs=0.1)
    assert (q @ k.transpose(-1, -2)).var().item() == pytest.approx(d_k, rel=0.1)


def test_attention_without_positions_is_permutation_equivariant() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 6, 8, generator=generator)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    out = attention_weights(q, k) @ v
    permuted = attention_weights(q[:, :, order], k[:, :, order]) @ v[:, :, order]
    assert torch.allclose(permuted, out[:, :, order], atol=1e-6)


def test_splitting_and_merging_heads_are_inverse_and_keep_each_heads_columns() -> None:
    x = torch.arange(2 * 3 * 8, dtype=torch.float32).view(2, 3, 8)
    heads = split_heads(x, 2)
    assert heads.shape == (2, 4, 3, 2)
    assert heads[1, 2, 0].tolist() == x[1, 0, 4:6].tolist()
    assert torch.equal(merge_heads(heads), x)


def test_grouped_heads_share_the_nearest_key_value_head() -> None:
    x = torch.tensor([10.0, 20.0]).view(1, 2, 1, 1)
    assert repeat_groups(x, 6).flatten().tolist() == [10, 10, 10, 20, 20, 20]
    assert repeat_groups(x, 2) is x
