"""How requests end that aren't answered in full: late, cancelled, stopped, or failed by a step."""

import numpy as np
import pytest

from quill.server.engine.engine import MAX_FAILURES
from quill.server.errors import CancelledError, DeadlineError, StepError, UnavailableError
from quill.server.request import BeamParams, SamplingParams
from tests.server import fake_session
from tests.server.engine_harness import CONTEXT, Harness, as_translation, make_request
from tests.server.fake_session import VOCAB_SIZE, oracle


def test_deadline_in_the_queue_is_an_error() -> None:
    harness = Harness(max_num_seqs=1)
    harness.submit(make_request("running", max_new_tokens=50))
    harness.submit(make_request("late", deadline_s=3.0))
    harness.step()
    harness.now_s = 3.0
    harness.step()
    assert isinstance(harness.failed["late"], DeadlineError)
    assert "late" not in harness.started


def test_deadline_of_a_running_request_keeps_what_was_made() -> None:
    harness = Harness()
    harness.submit(make_request(max_new_tokens=50, deadline_s=3.0, num_sequences=2))
    harness.step()
    harness.step()
    harness.now_s = 3.5
    harness.step()
    for sequence in range(2):
        assert harness.finished["r", sequence].reason == "deadline"
        assert harness.finished["r", sequence].usage.generated == 2
    assert harness.engine.is_idle


def test_cancelled_request_frees_its_sequence_before_the_next_step() -> None:
    harness = Harness(max_num_seqs=1)
    harness.submit(make_request("gone", max_new_tokens=50))
    harness.step()
    harness.submit(make_request("next"))
    harness.engine.end("gone", None, "cancelled")
    harness.step()
    assert harness.finished["gone", 0].reason == "cancelled"
    assert "next" in harness.started


def test_request_cancelled_while_its_prompt_is_prefilled_fails() -> None:
    harness = Harness(step_s=0.02)
    harness.submit(make_request("running", max_new_tokens=50))
    harness.step()
    harness.submit(make_request("gone", num_prompt=80))
    harness.step()
    harness.step()
    assert "gone" in harness.started
    harness.engine.end("gone", None, "cancelled")
    harness.step()
    assert isinstance(harness.failed["gone"], CancelledError)


def test_ending_what_has_ended_or_never_was_does_nothing() -> None:
    harness = Harness()
    harness.submit(make_request())
    harness.run()
    harness.engine.end("r", None, "cancelled")
    harness.engine.end("r", 0, "stop")
    harness.engine.end("never was", None, "cancelled")
    assert harness.engine.is_idle


def test_one_sequence_stopped_leaves_the_others() -> None:
    harness = Harness()
    request = make_request(
        num_sequences=3, max_new_tokens=9, sampling=SamplingParams(temperature=3.0)
    )
    harness.submit(request)
    harness.step()
    harness.engine.end("r", 0, "stop")
    harness.run()
    assert harness.finished["r", 0].reason == "stop"
    assert harness.answer(request)[1:] == oracle(request, CONTEXT)[1:]


def test_failing_decode_step_fails_its_sequences_and_nobody_else() -> None:
    harness = Harness()
    for name in ("a", "bb"):
        harness.submit(make_request(name, max_new_tokens=20))
    for _ in range(4):
        harness.step()
    harness.session.failures.append(RuntimeError("injected"))
    harness.step()
    waiting = make_request("ccc")
    harness.submit(waiting)
    harness.run()
    assert set(harness.failed) == {"a", "bb"}
    assert all(isinstance(error, StepError) for error in harness.failed.values())
    assert "request a" in str(harness.failed["a"])
    assert harness.answer(waiting) == oracle(waiting, CONTEXT)


def test_failing_prefill_fails_its_request_only() -> None:
    harness = Harness()
    running = make_request("a", max_new_tokens=20)
    harness.submit(running)
    harness.step()
    harness.step()
    harness.submit(make_request("bb"))
    harness.session.failures.append(RuntimeError("injected"))
    harness.run()
    assert set(harness.failed) == {"bb"}
    assert harness.answer(running) == oracle(running, CONTEXT)


def test_repeated_failures_break_the_engine_and_a_success_mends_it() -> None:
    harness = Harness()
    for number in range(MAX_FAILURES):
        assert not harness.engine.is_broken
        harness.session.failures.append(RuntimeError("injected"))
        harness.submit(make_request("x" * (number + 1)))
        harness.run()
    assert harness.engine.is_broken
    harness.submit(make_request("fine" * 5))
    harness.run()
    assert not harness.engine.is_broken


def test_sequence_whose_logits_are_not_finite_fails_alone() -> None:
    harness = Harness()
    requests = [make_request(name, max_new_tokens=10) for name in ("a", "bb", "ccc")]
    for request in requests:
        harness.submit(request)
    harness.step()
    harness.session.poisoned = {1}
    harness.step()
    harness.session.poisoned = set()
    harness.run()
    assert set(harness.failed) == {"bb"}
    assert isinstance(harness.failed["bb"], StepError)
    for request in (requests[0], requests[2]):
        assert harness.answer(request) == oracle(request, CONTEXT)


def test_abandoning_ends_everybody() -> None:
    harness = Harness(max_num_seqs=1)
    for name in ("a", "bb"):
        harness.submit(make_request(name, max_new_tokens=50))
    harness.step()
    harness.note(harness.engine.abandon(UnavailableError("stopping")))
    assert set(harness.failed) == {"a", "bb"}
    assert harness.engine.is_idle


def test_encoder_that_fails_fails_its_requests_and_no_others() -> None:
    harness = Harness()
    first, second = (as_translation(make_request(name)) for name in ("a", "bb"))
    harness.submit(first)
    harness.step()
    harness.submit(second)
    harness.session.failures.append(RuntimeError("broken"))
    harness.run()
    assert isinstance(harness.failed["bb"], StepError)
    assert harness.answer(first) == oracle(first, CONTEXT)


def test_copy_that_fails_fails_those_it_was_for_and_no_others() -> None:
    harness = Harness()
    one, several = make_request("a", max_new_tokens=20), make_request("bb", num_sequences=2)
    harness.submit(one)
    harness.step()
    harness.submit(several)
    harness.step()
    harness.session.copy_failures.append(RuntimeError("injected"))
    harness.run()
    assert set(harness.failed) == {"bb"}
    assert harness.answer(one) == oracle(one, CONTEXT)


def test_blocks_whose_logits_were_not_finite_are_not_given_to_others() -> None:
    harness = Harness()
    harness.session.poisoned = {0}
    harness.submit(make_request("a", num_prompt=40))
    harness.run()
    harness.session.poisoned = set()
    harness.submit(make_request("a" * 51, num_prompt=40))
    harness.run()
    assert set(harness.failed) == {"a"}
    assert harness.started["a" * 51] == 0


def test_search_whose_last_logits_were_not_finite_leaves_its_blocks_to_others() -> None:
    harness = Harness(num_blocks=12, block_size=4, context=40)
    harness.session.poisoned = {0}
    harness.submit(
        make_request("a", num_prompt=17, beams=BeamParams(num_beams=2), max_new_tokens=1)
    )
    harness.run()
    harness.session.poisoned = set()
    requests = [make_request(name, num_prompt=30, max_new_tokens=8) for name in ("bb", "ccc")]
    for request in requests:
        harness.submit(request)
    harness.run()
    assert set(harness.failed) == {"a"}
    for request in requests:
        assert harness.answer(request) == oracle(request, 40)


@pytest.mark.parametrize("max_new_tokens", [1, 5])
def test_search_with_more_beams_than_possible_tokens_fails_alone(
    max_new_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_V = np.full(VOCAB_SIZE, -np.inf, np.float32)
    few_V[:3] = 0.0
    monkeypatch.setattr(fake_session, "logits_after", lambda ids: few_V)
    harness = Harness(max_num_seqs=8)
    beside = make_request("a", max_new_tokens=10)
    harness.submit(beside)
    beams = BeamParams(num_beams=4)
    harness.submit(make_request("bb", beams=beams, num_sequences=4, max_new_tokens=max_new_tokens))
    harness.run()
    assert isinstance(harness.failed["bb"], StepError)
    assert set(harness.failed) == {"bb"}
    assert harness.answer(beside) == oracle(beside, CONTEXT)
    assert harness.engine._scheduler.num_blocks_used == 0
