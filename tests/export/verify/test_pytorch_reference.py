"""PyTorch's side of the comparison."""

import numpy as np
import pytest
import torch

from quill.export.verify.held_out import Passage
from quill.export.verify.pytorch_reference import Oracle, joined, surprise
from tests.export.tiny import LLAMA, SEQ2SEQ, make_checkpoint


def test_surprise_at_a_fair_coin_is_one_bit_a_toss() -> None:
    found = surprise(np.zeros((4, 2), np.float32), [0, 1, 1, 0])
    np.testing.assert_allclose(found.nll, np.log(2) * np.ones(3))
    assert found.perplexity == pytest.approx(2)


def test_surprise_follows_the_likelihood_of_what_came() -> None:
    logits = np.log(np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]]))
    found = surprise(logits, [0, 1, 2])
    np.testing.assert_allclose(found.nll, -np.log([0.2, 0.1]))
    np.testing.assert_array_equal(found.favourites, [0, 1])


def test_huge_logits_do_not_overflow() -> None:
    found = surprise(np.array([[1e5, 0.0], [0.0, 1e5]], np.float32), [0, 0])
    assert found.perplexity == pytest.approx(1)


def test_joined_surprises_weigh_every_token_alike() -> None:
    parts = [surprise(np.zeros((n, 4), np.float32), [0] * n) for n in (2, 5)]
    assert len(joined(parts).nll) == 1 + 4


def test_an_answer_has_the_networks_logits_and_caches() -> None:
    checkpoint = make_checkpoint(LLAMA)
    ids = (5, 6, 7, 8)
    answer = Oracle(checkpoint).answer(Passage(ids))
    with torch.no_grad():
        expected = checkpoint.build()(torch.tensor([ids]))[0].numpy()
    np.testing.assert_allclose(answer.logits_TV, expected, atol=1e-4)
    assert [cache.shape for cache in answer.caches] == [(2, 4, 16)] * 4
    assert answer.cross_caches == []


def test_a_source_is_parked_for_every_layer() -> None:
    answer = Oracle(make_checkpoint(SEQ2SEQ)).answer(Passage((1, 2), source=(3, 4, 5)))
    assert [cache.shape for cache in answer.cross_caches] == [(4, 3, 16)] * 4


def test_greedy_takes_the_most_likely_token_each_time() -> None:
    checkpoint = make_checkpoint(LLAMA)
    oracle = Oracle(checkpoint)
    found = oracle.greedy(Passage((5, 6)), 4)
    favourites = oracle.surprise(Passage((*found.ids, 0))).favourites
    assert found.ids[:2] == (5, 6)
    assert found.ids[2:] == tuple(favourites[1:5].tolist())
