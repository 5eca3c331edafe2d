"""Continuations of beams: the best of all beams, whatever row their logits are in."""

import numpy as np
import pytest

from quill.model.reference.sampling import log_probabilities
from quill.server.request import BeamParams, Request
from quill.server.sampling.beam_search import Beam, Search, rank


def search(num_beams: int, logprobs: int | None = None) -> Search:
    request = Request(
        request_id="r", prompt_ids=(1,), beams=BeamParams(num_beams=num_beams), logprobs=logprobs
    )
    found = Search(request, 8)
    found.running = [Beam((i,), -float(i)) for i in range(num_beams)]
    return found


def test_the_best_of_all_beams_are_found_in_any_rows() -> None:
    logits_RV = np.random.default_rng(0).normal(size=(7, 5000)).round(1).astype(np.float32)
    rows, searches = [6, 2, 0, 4, 4], [search(2), search(3, logprobs=1)]
    rankings = rank(logits_RV, searches, rows)
    assert not rankings.not_finite
    for each, ranked, own in zip(searches, rankings.ranked, ([6, 2], [0, 4, 4]), strict=True):
        totals = [
            beam.logprob + log_probabilities(logits_RV[row])
            for beam, row in zip(each.running, own, strict=True)
        ]
        order = np.argsort(-np.concatenate(totals).round(9), kind="stable")[: each.num_ranked]
        assert [(one.parent, one.token) for one in ranked] == [divmod(i, 5000) for i in order]
        reports = [one.report for one in ranked]
        assert all((report is None) == (each.request.logprobs is None) for report in reports)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_beams_that_are_not_finite_are_named_and_leave_something_to_go_on_with(bad: float) -> None:
    logits_RV = np.random.default_rng(1).normal(size=(4, 300)).astype(np.float32)
    logits_RV[2, 7] = bad
    searches = [search(2), search(2, logprobs=2)]
    rankings = rank(logits_RV, searches)
    assert rankings.not_finite == {2}
    assert [len(ranked) for ranked in rankings.ranked] == [each.num_ranked for each in searches]
    alone = rank(logits_RV[:2], searches[:1])
    assert rankings.ranked[0] == alone.ranked[0]
