"""Reported log-probabilities are the reference's."""

import numpy as np
import pytest

from quill.model.reference.sampling import log_probabilities
from quill.server.sampling import native
from quill.server.sampling.sampler import position_logprobs


@pytest.mark.parametrize("vocab_size", [5, 25, 1000, 40_000])
def test_logprobs_are_of_the_models_own_distribution(vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    logits_RV = (rng.normal(size=(3, vocab_size)) * 4).astype(np.float32)
    tokens, num_tops = [0, 4, 2], [0, 3, 20]
    answers = position_logprobs(logits_RV, tokens, num_tops)
    for logits_V, token, num_top, answer in zip(logits_RV, tokens, num_tops, answers, strict=True):
        expected_V = log_probabilities(logits_V)
        best = np.argsort(-expected_V, kind="stable")[:num_top]
        assert answer.token_id == token
        assert answer.logprob == pytest.approx(expected_V[token], abs=1e-12)
        assert [each.token_id for each in answer.top] == best.tolist()
        assert [each.logprob for each in answer.top] == pytest.approx(expected_V[best], abs=1e-12)


def test_lowest_id_comes_first_among_equals() -> None:
    answer = position_logprobs(np.zeros((1, 30_000), np.float32), [7], [4])[0]
    assert [each.token_id for each in answer.top] == [0, 1, 2, 3]


def test_rows_may_be_chosen_and_those_that_are_not_finite_are_named() -> None:
    logits_RV = np.random.default_rng(1).normal(size=(4, 300)).astype(np.float32)
    logits_RV[1, 3] = np.nan
    logits_RV[3, :] = -np.inf
    logits_RV[2, 5:] = -np.inf
    tops = native.tops(logits_RV, [2, 1, 3, 2], [9, 9, 9, 2])
    assert tops.not_finite == [1, 2]
    assert tops.num_R.tolist() == [5, 0, 0, 2], "-inf is never among them"
    one, other = position_logprobs(logits_RV, [4, 7], [1, 0], [2, 0])
    assert one.top[0].token_id == logits_RV[2].argmax()
    assert other.logprob == pytest.approx(log_probabilities(logits_RV[0])[7], abs=1e-12)
