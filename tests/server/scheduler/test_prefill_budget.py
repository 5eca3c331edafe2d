"""Chunks take about as long as a decode step."""

from collections.abc import Callable

import pytest

from quill.server.scheduler.prefill_budget import (
    MIN_CHUNK,
    MIN_STALL_S,
    QUEUE_STALL_S,
    STALL,
    PrefillBudget,
)


def _settle(
    budget: PrefillBudget, decode_s: float, cost_s: Callable[[int], float], num_waiting: int = 0
) -> int:
    for _ in range(40):
        budget.note_decode(decode_s)
        chunk = budget.max_chunk(num_rows=8)
        budget.note_prefill(chunk, cost_s(chunk), num_waiting)
    budget.note_decode(decode_s)
    return budget.max_chunk(num_rows=8)


@pytest.mark.parametrize("decode_s", [0.040, 0.080, 0.2])
def test_chunk_grows_or_shrinks_to_the_time_of_a_decode_step(decode_s: float) -> None:
    chunk = _settle(PrefillBudget(), decode_s, lambda tokens: 0.014 + 0.0018 * tokens)
    assert 0.014 + 0.0018 * chunk == pytest.approx(STALL * decode_s, rel=0.15)


def test_chunk_keeps_a_useful_time_where_decode_steps_are_short() -> None:
    chunk = _settle(PrefillBudget(), 0.002, lambda tokens: 0.001 * tokens)
    assert 0.001 * chunk == pytest.approx(MIN_STALL_S, rel=0.15)


def test_chunk_may_take_longer_while_more_requests_wait() -> None:
    chunk = _settle(PrefillBudget(), 0.002, lambda tokens: 0.001 * tokens, num_waiting=3)
    assert 0.001 * chunk == pytest.approx(QUEUE_STALL_S, rel=0.15)


def test_chunk_never_gets_uselessly_short_and_grows_again() -> None:
    budget = PrefillBudget()
    assert _settle(budget, 0.001, lambda tokens: 10.0) == MIN_CHUNK
    chunk = _settle(budget, 0.080, lambda tokens: 0.030 + 0.0018 * tokens)
    assert 0.030 + 0.0018 * chunk == pytest.approx(STALL * 0.080, rel=0.15)


def test_chunk_is_as_long_as_allowed_when_nobody_runs() -> None:
    budget = PrefillBudget(max_chunk=100)
    _settle(budget, 0.001, lambda tokens: 10.0)
    assert budget.max_chunk(num_rows=0) == 100


def test_short_prompts_do_not_lengthen_chunks() -> None:
    budget = PrefillBudget()
    before = budget.max_chunk(num_rows=1)
    for _ in range(10):
        budget.note_decode(0.05)
        budget.note_prefill(3, 0.001, num_waiting=0)
    assert budget.max_chunk(num_rows=1) == before


def _num_read(budget: PrefillBudget, cost_s: float, num_waiting: int) -> int:
    """How many prompts of this cost are read between two decode steps."""
    budget.note_decode(0.080)
    budget.note_prefill(4, cost_s, num_waiting)
    num = 1
    while budget.may_go_on:
        budget.note_prefill(4, cost_s, num_waiting)
        num += 1
    return num


def test_short_prompts_share_the_time_of_a_chunk() -> None:
    budget = PrefillBudget()
    assert _num_read(budget, 0.020, num_waiting=0) == int(STALL * 0.080 / 0.020)
    assert _num_read(budget, 0.020, num_waiting=9) == int(QUEUE_STALL_S / 0.020)


def test_a_chunk_that_took_its_time_is_alone() -> None:
    assert _num_read(PrefillBudget(), STALL * 0.080, num_waiting=0) == 1


def test_what_short_prompts_took_is_taken_off_the_next_chunk() -> None:
    budget = PrefillBudget()
    chunk = _settle(budget, 0.080, lambda tokens: 0.014 + 0.0018 * tokens)
    budget.note_decode(0.080)
    budget.note_prefill(4, STALL * 0.080 / 2, num_waiting=0)
    assert budget.max_chunk(num_rows=8) == pytest.approx(chunk / 2, abs=1)
