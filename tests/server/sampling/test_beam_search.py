"""Beam search: its answers are those of model/reference/beam_search.py, alone or batched.

Random batches with searches are in tests/server/engine/test_batch_invariance.py.
"""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from quill.model.reference.beam_search import beam_search
from quill.model.reference.sampling import log_probabilities
from quill.server.errors import CancelledError, DeadlineError, InvalidFieldError
from quill.server.request import BeamParams, Request
from quill.server.sampling.beam_search import Beam, Search, rank
from tests.operators import SERVED
from tests.server import engine_harness
from tests.server.engine_harness import Harness, reference_search
from tests.server.fake_session import oracle
from tests.server.tiny_bundle import CONTEXT, TinyBundle


def _searching(**changes: Any) -> Request:
    request = Request(
        request_id="r", prompt_ids=(1, 2, 3), beams=BeamParams(num_beams=3), max_new_tokens=20
    )
    return dataclasses.replace(request, **changes)


def _random_request(name: str, family: str, rng: random.Random) -> Request:
    ids = tuple(rng.randrange(512) for _ in range(rng.randint(1, 40)))
    beams = None
    if rng.random() < 0.7:
        beams = BeamParams(
            num_beams=rng.randint(2, 4),
            length_penalty=rng.choice([0.6, 1.0, 2.0]),
            early_stopping=rng.choice(["heuristic", "at_once", "never"]),
        )
    return Request(
        request_id=name,
        prompt_ids=ids if family == "causal" else (0,),
        source_ids=None if family == "causal" else ids,
        beams=beams,
        num_sequences=1 if beams is None else rng.randint(1, beams.num_beams),
        max_new_tokens=rng.randint(4, 20),
        eos_ids=frozenset(rng.sample(range(512), 12)),
        seed=rng.getrandbits(64),
        logprobs=rng.choice([None, 2]),
    )


@pytest.mark.parametrize("precision", SERVED)
@pytest.mark.parametrize("family", ["causal", "seq2seq"])
def test_batched_beams_are_those_of_the_reference_and_of_the_request_alone(
    tiny_bundle: TinyBundle, tiny_translator: TinyBundle, family: str, precision: str
) -> None:
    bundle = tiny_bundle if family == "causal" else tiny_translator
    rng = random.Random(3)
    requests = [_random_request(str(number), family, rng) for number in range(16)]
    batched, alone = (
        Harness(num_seqs, 40, session=bundle.session(precision, 40), context=CONTEXT)
        for num_seqs in (10, 4)
    )
    for request in requests:
        batched.submit(request)
        for _ in range(rng.randint(0, 5)):
            batched.step()
    batched.run()
    for request in requests:
        name = request.request_id
        alone.submit(request)
        alone.run()
        assert batched.tokens[name, 0] == alone.tokens[name, 0]
        assert batched.found[name] == alone.found[name], "logprobs to the last bit"
        for i in range(request.num_sequences):
            assert batched.finished[name, i].score == alone.finished[name, i].score
        if request.beams is not None and precision == "fp32":
            parameters = engine_harness.beam_parameters(request)
            expected = beam_search(
                *(bundle.model, request.prompt_ids, parameters),
                source_ids=request.source_ids,
                cached=True,
            )
            batched.check_search(request, expected)


def test_search_that_is_ended_has_no_answer_and_frees_its_sequences() -> None:
    harness = Harness()
    harness.now_s = 5.0
    after = _searching(request_id="after")
    late = _searching(request_id="late", deadline_s=5.0)
    for request in (_searching(request_id="gone"), late, after):
        harness.submit(request)
    for _ in range(4):
        harness.step()
    harness.engine.end("gone", None, "cancelled")
    harness.run()
    assert isinstance(harness.failed["gone"], CancelledError)
    assert isinstance(harness.failed["late"], DeadlineError)
    assert "before the search was over" in str(harness.failed["late"])
    harness.check_search(after, reference_search(after))


def test_logits_that_are_not_finite_fail_the_search_and_no_other_request() -> None:
    harness = Harness(max_num_seqs=5)
    other = Request(request_id="other", prompt_ids=(4, 5), max_new_tokens=9)
    harness.submit(_searching())
    harness.submit(other)
    for _ in range(4):
        harness.step()
    harness.session.poisoned = {1}
    harness.step()
    harness.session.poisoned = set()
    harness.run()
    assert set(harness.failed) == {"r"}
    assert harness.answer(other) == oracle(other, engine_harness.CONTEXT)


def test_beams_share_all_but_the_block_that_they_write_into() -> None:
    harness = Harness()
    request = _searching(prompt_ids=tuple(range(40)), max_new_tokens=40)
    harness.submit(request)
    most = 0
    while not harness.engine.is_idle:
        queue = harness.step().queue
        assert queue is not None
        most = max(most, queue.num_blocks)
    harness.check_search(request, reference_search(request))
    assert most <= 2 + 3 * 3, "two full blocks of the prompt, and each beam's own"


@pytest.mark.parametrize("penalty", [10.5, float("nan")])
def test_length_penalty_out_of_range_is_rejected_by_name(penalty: float) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        BeamParams(num_beams=2, length_penalty=penalty)
    assert caught.value.field == "length_penalty"


def test_more_answers_than_beams_are_rejected() -> None:
    with pytest.raises(InvalidFieldError, match="at most num_beams, which is 3"):
        _searching(num_sequences=4)


def _search(num_beams: int, logprobs: int | None = None) -> Search:
    request = Request(
        request_id="r", prompt_ids=(1,), beams=BeamParams(num_beams=num_beams), logprobs=logprobs
    )
    found = Search(request, 8)
    found.running = [Beam((i,), -float(i)) for i in range(num_beams)]
    return found


def test_the_best_of_all_beams_are_found_in_any_rows() -> None:
    logits_RV = np.random.default_rng(0).normal(size=(7, 5000)).round(1).astype(np.float32)
    rows, searches = [6, 2, 0, 4, 4], [_search(2), _search(3, logprobs=1)]
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
    searches = [_search(2), _search(2, logprobs=2)]
    rankings = rank(logits_RV, searches)
    assert rankings.not_finite == {2}
    assert [len(ranked) for ranked in rankings.ranked] == [each.num_ranked for each in searches]
    alone = rank(logits_RV[:2], searches[:1])
    assert rankings.ranked[0] == alone.ranked[0]
