"""How requests end that aren't answered in full: late, cancelled, stopped, or failed by a step."""

import numpy as np
import pytest

from quill.server.engine.engine import MAX_FAILURES
from quill.server.errors import CancelledError, DeadlineError, StepError, UnavailableError
from quill.server.request import BeamParams, SamplingParams
from tests.server import fake_session
from tests.server.engine_harness import CONTEXT, House, as_translation, make_request
from tests.server.fake_session import VOCAB_SIZE, oracle


def test_deadline_in_the_queue_is_an_error() -> None:
    house = House(max_num_seqs=1)
    house.submit(make_request("running", max_new_tokens=50))
    house.submit(make_request("late", deadline_s=3.0))
    house.step()
    house.now_s = 3.0
    house.step()
    assert isinstance(house.failed["late"], DeadlineError)
    assert "late" not in house.started


def test_deadline_of_a_running_request_keeps_what_was_made() -> None:
    house = House()
    house.submit(make_request(max_new_tokens=50, deadline_s=3.0, num_sequences=2))
    house.step()
    house.step()
    house.now_s = 3.5
    house.step()
    for sequence in range(2):
        assert house.finished["r", sequence].reason == "deadline"
        assert house.finished["r", sequence].usage.generated == 2
    assert house.engine.is_idle


def test_cancelled_request_frees_its_row_before_the_next_step() -> None:
    house = House(max_num_seqs=1)
    house.submit(make_request("gone", max_new_tokens=50))
    house.step()
    house.submit(make_request("next"))
    house.engine.end("gone", None, "cancelled")
    house.step()
    assert house.finished["gone", 0].reason == "cancelled"
    assert "next" in house.started


def test_request_cancelled_while_its_prompt_is_read_fails() -> None:
    house = House(step_s=0.02)
    house.submit(make_request("running", max_new_tokens=50))
    house.step()
    house.submit(make_request("gone", num_prompt=80))
    house.step()
    house.step()
    assert "gone" in house.started
    house.engine.end("gone", None, "cancelled")
    house.step()
    assert isinstance(house.failed["gone"], CancelledError)


def test_ending_what_has_ended_or_never_was_does_nothing() -> None:
    house = House()
    house.submit(make_request())
    house.run()
    house.engine.end("r", None, "cancelled")
    house.engine.end("r", 0, "stop")
    house.engine.end("never was", None, "cancelled")
    assert house.engine.is_idle


def test_one_sequence_stopped_leaves_the_others() -> None:
    house = House()
    request = make_request(
        num_sequences=3, max_new_tokens=9, sampling=SamplingParams(temperature=3.0)
    )
    house.submit(request)
    house.step()
    house.engine.end("r", 0, "stop")
    house.run()
    assert house.finished["r", 0].reason == "stop"
    assert house.answer(request)[1:] == oracle(request, CONTEXT)[1:]


def test_failing_decode_step_fails_its_rows_and_nobody_else() -> None:
    house = House()
    for name in ("a", "bb"):
        house.submit(make_request(name, max_new_tokens=20))
    for _ in range(4):
        house.step()
    house.session.failures.append(RuntimeError("injected"))
    house.step()
    waiting = make_request("ccc")
    house.submit(waiting)
    house.run()
    assert set(house.failed) == {"a", "bb"}
    assert all(isinstance(error, StepError) for error in house.failed.values())
    assert "request a" in str(house.failed["a"])
    assert house.answer(waiting) == oracle(waiting, CONTEXT)


def test_failing_prefill_fails_its_request_only() -> None:
    house = House()
    running = make_request("a", max_new_tokens=20)
    house.submit(running)
    house.step()
    house.step()
    house.submit(make_request("bb"))
    house.session.failures.append(RuntimeError("injected"))
    house.run()
    assert set(house.failed) == {"bb"}
    assert house.answer(running) == oracle(running, CONTEXT)


def test_repeated_failures_break_the_engine_and_a_success_mends_it() -> None:
    house = House()
    for number in range(MAX_FAILURES):
        assert not house.engine.is_broken
        house.session.failures.append(RuntimeError("injected"))
        house.submit(make_request("x" * (number + 1)))
        house.run()
    assert house.engine.is_broken
    house.submit(make_request("fine" * 5))
    house.run()
    assert not house.engine.is_broken


def test_row_whose_logits_are_not_finite_fails_alone() -> None:
    house = House()
    requests = [make_request(name, max_new_tokens=10) for name in ("a", "bb", "ccc")]
    for request in requests:
        house.submit(request)
    house.step()
    house.session.poisoned = {1}
    house.step()
    house.session.poisoned = set()
    house.run()
    assert set(house.failed) == {"bb"}
    assert isinstance(house.failed["bb"], StepError)
    for request in (requests[0], requests[2]):
        assert house.answer(request) == oracle(request, CONTEXT)


def test_abandoning_ends_everybody() -> None:
    house = House(max_num_seqs=1)
    for name in ("a", "bb"):
        house.submit(make_request(name, max_new_tokens=50))
    house.step()
    house.note(house.engine.abandon(UnavailableError("stopping")))
    assert set(house.failed) == {"a", "bb"}
    assert house.engine.is_idle


def test_encoder_that_fails_fails_its_requests_and_no_others() -> None:
    house = House()
    first, second = (as_translation(make_request(name)) for name in ("a", "bb"))
    house.submit(first)
    house.step()
    house.submit(second)
    house.session.failures.append(RuntimeError("broken"))
    house.run()
    assert isinstance(house.failed["bb"], StepError)
    assert house.answer(first) == oracle(first, CONTEXT)


def test_copy_that_fails_fails_those_it_was_for_and_no_others() -> None:
    house = House()
    one, several = make_request("a", max_new_tokens=20), make_request("bb", num_sequences=2)
    house.submit(one)
    house.step()
    house.submit(several)
    house.step()
    house.session.copy_failures.append(RuntimeError("injected"))
    house.run()
    assert set(house.failed) == {"bb"}
    assert house.answer(one) == oracle(one, CONTEXT)


def test_blocks_whose_logits_were_not_finite_are_not_given_to_others() -> None:
    house = House()
    house.session.poisoned = {0}
    house.submit(make_request("a", num_prompt=40))
    house.run()
    house.session.poisoned = set()
    house.submit(make_request("a" * 51, num_prompt=40))
    house.run()
    assert set(house.failed) == {"a"}
    assert house.started["a" * 51] == 0


def test_search_whose_last_logits_were_not_finite_leaves_its_blocks_to_others() -> None:
    house = House(num_blocks=12, block_size=4, context=40)
    house.session.poisoned = {0}
    house.submit(make_request("a", num_prompt=17, beams=BeamParams(num_beams=2), max_new_tokens=1))
    house.run()
    house.session.poisoned = set()
    requests = [make_request(name, num_prompt=30, max_new_tokens=8) for name in ("bb", "ccc")]
    for request in requests:
        house.submit(request)
    house.run()
    assert set(house.failed) == {"a"}
    for request in requests:
        assert house.answer(request) == oracle(request, 40)


@pytest.mark.parametrize("max_new_tokens", [1, 5])
def test_search_with_more_beams_than_possible_tokens_fails_alone(
    max_new_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_V = np.full(VOCAB_SIZE, -np.inf, np.float32)
    few_V[:3] = 0.0
    monkeypatch.setattr(fake_session, "logits_after", lambda ids: few_V)
    house = House(max_num_seqs=8)
    beside = make_request("a", max_new_tokens=10)
    house.submit(beside)
    beams = BeamParams(num_beams=4)
    house.submit(make_request("bb", beams=beams, num_sequences=4, max_new_tokens=max_new_tokens))
    house.run()
    assert isinstance(house.failed["bb"], StepError)
    assert set(house.failed) == {"bb"}
    assert house.answer(beside) == oracle(beside, CONTEXT)
    assert house.engine._scheduler.num_blocks_used == 0
