"""What an answer's form changes, step by step, without a model."""

from typing import Any

import numpy as np
import pytest

from quill.model.reference.sampling import log_probabilities
from quill.server.errors import InvalidFieldError
from quill.server.request import Request, SamplingParams
from tests.server.engine_harness import CONTEXT, House, make_request
from tests.server.fake_session import logits_after, oracle
from tests.server.small_grammars import EOS, GRAMMARS, small_grammar, text_of


def formed(kind: str, **fields: Any) -> Request:
    form = {"constraint": small_grammar(*GRAMMARS[kind]), "eos_ids": frozenset({EOS})}
    return make_request(**{"max_new_tokens": 60, **form, **fields})


def test_tokens_that_are_forced_are_checked_in_the_step_of_the_one_before() -> None:
    steps = {}
    for speculative in (True, False):
        house = House(speculative=speculative)
        request = formed("schema", sampling=SamplingParams(temperature=0.0), logprobs=1)
        house.submit(request)
        house.run()
        assert house.answer(request) == oracle(request, CONTEXT)
        assert house.finished["r", 0].reason == "eos"
        steps[speculative] = len(house.session.steps)
        usage = house.finished["r", 0].usage
        assert (usage.draft > 0) == (usage.accepted > 0) == speculative
        for place, report in enumerate(house.logprobs["r", 0]):
            assert report is not None
            text = [*request.prompt_ids, *house.tokens["r", 0][:place]]
            expected_V = log_probabilities(logits_after(text))
            assert report.logprob == pytest.approx(expected_V[report.token_id], abs=1e-5)
            assert report.top[0].token_id == int(np.argmax(expected_V)), "the model's own"
    assert steps[True] < 0.8 * steps[False]


def test_steps_report_what_was_forced_and_how_long_masks_took() -> None:
    house = House()
    house.submit(formed("schema", sampling=SamplingParams(temperature=0.0)))
    house.submit(make_request("free", max_new_tokens=50))
    reports = []
    while not house.engine.is_idle:
        report = house.step().step
        reports += [] if report is None else [report]
    usage = house.finished["r", 0].usage
    assert 0 < sum(each.num_jump_forward for each in reports) <= usage.accepted
    assert all(0 <= each.num_jump_forward <= each.num_accepted for each in reports)
    assert reports[0].masks_s is not None
    assert reports[0].masks_s > 0
    assert reports[-1].masks_s is None, "the one that keeps to a form has ended"


def test_an_answer_that_is_cut_says_so() -> None:
    house = House()
    house.submit(formed("schema", max_new_tokens=5))
    house.run()
    assert house.finished["r", 0].reason == "length"
    assert len(house.tokens["r", 0]) == 5


def test_a_whole_document_ends_even_before_it_may() -> None:
    house = House()
    request = formed("choice", min_new_tokens=50)
    house.submit(request)
    house.run()
    assert house.answer(request) == oracle(request, CONTEXT)
    assert house.finished["r", 0].reason == "eos"
    assert text_of(house.tokens["r", 0]) in ("abc", "true", "trust"), "ab could go on"


def test_a_form_that_cannot_be_followed_any_more_ends_its_request_alone() -> None:
    house, bystander = House(), make_request("bystander")
    request = formed("object", num_sequences=2)
    house.submit(request)
    house.submit(bystander)
    house.step()
    group = house.engine._scheduler.find("r")
    assert group is not None
    matcher = group.sequences[0].matcher
    assert matcher is not None
    matcher.accept(0)  # which nothing allows
    house.run()
    assert isinstance(house.failed["r"], InvalidFieldError)
    assert house.failed["r"].field == "constraint"
    assert house.answer(bystander) == oracle(bystander, CONTEXT)
    assert not house.engine._scheduler.num_blocks_used


def test_a_step_that_fails_leaves_no_mask_behind() -> None:
    house = House()
    request = formed("schema", sampling=SamplingParams(temperature=0.0))
    house.submit(request)
    house.step()
    house.session.failures.append(RuntimeError("a bug"))
    house.step()
    assert "r" in house.failed
    again = formed("schema", sampling=SamplingParams(temperature=0.0), name="again")
    house.submit(again)
    house.run()
    assert house.answer(again) == oracle(again, CONTEXT)
