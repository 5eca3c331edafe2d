"""PyTorch's side of the comparison."""

import numpy as np
import pytest
import torch

from quill.export.verify.held_out import Passage
from quill.export.verify.pytorch_reference import PyTorchReference, concatenate, score_sequence
from tests.export.tiny import make_checkpoint
from tests.tiny_networks import LLAMA, SEQ2SEQ


def test_the_nll_of_a_fair_coin_is_one_bit_a_toss() -> None:
    found = score_sequence(np.zeros((4, 2), np.float32), [0, 1, 1, 0])
    np.testing.assert_allclose(found.nll, np.log(2) * np.ones(3))
    assert found.perplexity == pytest.approx(2)


def test_the_nll_follows_the_likelihood_of_the_next_token() -> None:
    logits = np.log(np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]]))
    found = score_sequence(logits, [0, 1, 2])
    np.testing.assert_allclose(found.nll, -np.log([0.2, 0.1]))
    np.testing.assert_array_equal(found.greedy_ids, [0, 1])


def test_huge_logits_do_not_overflow() -> None:
    found = score_sequence(np.array([[1e5, 0.0], [0.0, 1e5]], np.float32), [0, 0])
    assert found.perplexity == pytest.approx(1)


def test_every_token_has_the_same_weight() -> None:
    parts = [score_sequence(np.zeros((n, 4), np.float32), [0] * n) for n in (2, 5)]
    assert len(concatenate(parts).nll) == 1 + 4


def test_an_answer_has_the_networks_logits_and_caches() -> None:
    checkpoint = make_checkpoint(LLAMA)
    ids = (5, 6, 7, 8)
    answer = PyTorchReference(checkpoint).output(Passage(ids))
    with torch.no_grad():
        expected = checkpoint.build()(torch.tensor([ids]))[0].numpy()
    np.testing.assert_allclose(answer.logits_TV, expected, atol=1e-4)
    assert [cache.shape for cache in answer.caches] == [(2, 4, 16)] * 4
    assert answer.cross_caches == []


def test_every_layer_has_keys_and_values_of_the_source() -> None:
    answer = PyTorchReference(make_checkpoint(SEQ2SEQ)).output(Passage((1, 2), source=(3, 4, 5)))
    assert [cache.shape for cache in answer.cross_caches] == [(4, 3, 16)] * 4


def test_greedy_takes_the_most_likely_token_each_time() -> None:
    checkpoint = make_checkpoint(LLAMA)
    reference = PyTorchReference(checkpoint)
    found = reference.greedy(Passage((5, 6)), 4)
    greedy_ids = reference.score(Passage((*found.ids, 0))).greedy_ids
    assert found.ids[:2] == (5, 6)
    assert found.ids[2:] == tuple(greedy_ids[1:5].tolist())
