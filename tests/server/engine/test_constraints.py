"""What an answer's form changes, step by step, without a model."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quill.model.reference.sampling import log_probabilities
from quill.server.errors import InvalidFieldError
from quill.server.grammar.matcher import MAX_COMPUTED, TokenMatcher
from quill.server.request import Constraint, Request, SamplingParams
from tests.server.engine_harness import CONTEXT, Harness, make_request
from tests.server.fake_session import logits_after, oracle
from tests.server.small_grammars import EOS, GRAMMARS, text_of


def constrained(kind: str, **fields: Any) -> Request:
    asked = {"constraint": Constraint(*GRAMMARS[kind]), "eos_ids": frozenset({EOS})}
    return make_request(**{"max_new_tokens": 60, **asked, **fields})


def test_tokens_that_a_grammar_forces_are_checked_in_the_step_of_the_one_before() -> None:
    steps = {}
    for speculative in (True, False):
        harness = Harness(speculative=speculative)
        request = constrained("schema", sampling=SamplingParams(temperature=0.0), logprobs=1)
        harness.submit(request)
        harness.run()
        assert harness.answer(request) == oracle(request, CONTEXT)
        assert harness.finished["r", 0].reason == "eos"
        steps[speculative] = len(harness.session.steps)
        usage = harness.finished["r", 0].usage
        assert (usage.draft > 0) == (usage.accepted > 0) == speculative
        for place, report in enumerate(harness.logprobs["r", 0]):
            assert report is not None
            text = [*request.prompt_ids, *harness.tokens["r", 0][:place]]
            expected_V = log_probabilities(logits_after(text))
            assert report.logprob == pytest.approx(expected_V[report.token_id], abs=1e-5)
            assert report.top[0].token_id == int(np.argmax(expected_V)), "the model's own"
    assert steps[True] < 0.8 * steps[False]


def test_steps_report_jump_forward_tokens_and_how_long_masks_took() -> None:
    harness = Harness()
    harness.submit(constrained("schema", sampling=SamplingParams(temperature=0.0)))
    harness.submit(make_request("free", max_new_tokens=50))
    reports = []
    while not harness.engine.is_idle:
        report = harness.step().step
        reports += [] if report is None else [report]
    usage = harness.finished["r", 0].usage
    assert 0 < sum(each.num_jump_forward for each in reports) <= usage.accepted
    assert all(0 <= each.num_jump_forward <= each.num_accepted for each in reports)
    assert reports[0].masks_s is not None
    assert reports[0].masks_s > 0
    assert reports[-1].masks_s is None, "the one that keeps to a form has ended"


def test_step_computes_long_jump_forwards_of_one_grammar_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed: list[int] = []
    call = TokenMatcher._call

    def counting(matcher: TokenMatcher, name: str, *arguments: Any) -> Any:
        result = call(matcher, name, *arguments)
        if name == "compute_ff_tokens":
            computed.append(len(result))
        return result

    monkeypatch.setattr(TokenMatcher, "_call", counting)
    harness = Harness(max_num_seqs=4)
    requests = [
        constrained("regex", constraint=Constraint("regex", f"[bc]{letter}(ad){{2000}}"))
        for letter in "abcd"
    ]
    for number, request in enumerate(requests):
        harness.submit(replace(request, request_id=f"r{number}", max_new_tokens=12))
    most = 0
    while not harness.engine.is_idle:
        computed.clear()
        harness.step()
        most = max(most, sum(computed))
    assert MAX_COMPUTED < most < 2 * 4000, "all four would be 16,000 at once"
    assert {event.reason for event in harness.finished.values()} == {"length"}


def test_an_answer_that_is_cut_says_so() -> None:
    harness = Harness()
    harness.submit(constrained("schema", max_new_tokens=5))
    harness.run()
    assert harness.finished["r", 0].reason == "length"
    assert len(harness.tokens["r", 0]) == 5


def test_a_whole_document_ends_even_before_it_may() -> None:
    harness = Harness()
    request = constrained("choice", min_new_tokens=50)
    harness.submit(request)
    harness.run()
    assert harness.answer(request) == oracle(request, CONTEXT)
    assert harness.finished["r", 0].reason == "eos"
    assert text_of(harness.tokens["r", 0]) in ("abc", "true", "trust"), "ab could go on"


def test_a_grammar_that_cannot_be_followed_any_more_ends_its_request_alone() -> None:
    harness, bystander = Harness(), make_request("bystander")
    request = constrained("object", num_sequences=2)
    harness.submit(request)
    harness.submit(bystander)
    harness.step()
    group = harness.engine._scheduler.find("r")
    assert group is not None
    matcher = group.sequences[0].matcher
    assert matcher is not None
    matcher.accept(0)  # which nothing allows
    harness.run()
    assert isinstance(harness.failed["r"], InvalidFieldError)
    assert harness.failed["r"].field == "constraint"
    assert harness.answer(bystander) == oracle(bystander, CONTEXT)
    assert not harness.engine._scheduler.num_blocks_used


def test_a_step_that_fails_leaves_no_mask_behind() -> None:
    harness = Harness()
    request = constrained("schema", sampling=SamplingParams(temperature=0.0))
    harness.submit(request)
    harness.step()
    harness.session.failures.append(RuntimeError("a bug"))
    harness.step()
    assert "r" in harness.failed
    again = constrained("schema", sampling=SamplingParams(temperature=0.0), name="again")
    harness.submit(again)
    harness.run()
    assert harness.answer(again) == oracle(again, CONTEXT)
