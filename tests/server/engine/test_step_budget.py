"""What steps cost, and which prompts are prefilled within the budget."""

import random

import pytest

from quill.server.engine.block_pool import BlockTables
from quill.server.engine.prefill import PrefillScheduler
from quill.server.engine.step_budget import (
    GAIN,
    IDLE_S,
    MAX_JUMP_FORWARD,
    MIN_STALL_S,
    PROBE,
    QUEUE_STALL_S,
    STALL,
    ChunkSize,
    StepBudget,
)
from quill.server.engine.strategies import make_group
from quill.server.request import Limits, Request


def _taught(rows_s: float, token_s: float, past_s: float, noise: float = 0.0) -> StepBudget:
    budget, rng = StepBudget(), random.Random(1)
    for step in range(300):
        blur = 1 + noise * (rng.random() - 0.5)
        if step % 10 == 0:
            budget.observe(rows_s * blur, 8, 0, [])
            continue
        chunk = ChunkSize(rng.randint(8, 64), rng.randint(0, 8000))
        mean_past = chunk.past + chunk.num_tokens / 2
        chunk_s = chunk.num_tokens * (token_s + past_s * mean_past)
        budget.observe((rows_s + chunk_s) * blur, 8, 0, [chunk])
    return budget


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_cost_of_tokens_and_of_what_comes_before_them_is_learnt(noise: float) -> None:
    budget = _taught(0.03, 0.001, 3e-7, noise)
    for past in (0, 2000, 8000):
        assert budget.cost_s(30, past) == pytest.approx(30 * (0.001 + 3e-7 * past), rel=0.3)
        num = budget.num_affordable(0.03, past)
        assert budget.cost_s(num, past) == pytest.approx(0.03, rel=0.15)


def test_prompts_may_take_as_long_as_a_decode_and_a_little_where_these_are_quick() -> None:
    assert _taught(0.05, 0.001, 0).prefill_s(8, 1) == pytest.approx(STALL * 0.05, rel=0.1)
    assert _taught(0.002, 0.001, 0).prefill_s(8, 1) == MIN_STALL_S
    assert _taught(0.002, 0.001, 0).prefill_s(8, 2) == QUEUE_STALL_S, "a crowd isn't kept out"
    assert _taught(0.05, 0.001, 0).prefill_s(0, 1) == IDLE_S


def test_one_slow_step_is_noise_and_a_slow_machine_is_not() -> None:
    budget = _taught(0.03, 0.001, 0)
    budget.observe(5.0, 8, 0, [ChunkSize(30, 0)])
    assert budget.cost_s(30, 0) < 3 * 0.03
    for _ in range(100):
        budget.observe(0.5, 0, 0, [ChunkSize(30, 0)])
    assert budget.cost_s(30, 0) == pytest.approx(0.5, rel=0.2)


def test_decodes_are_alone_now_and_then_so_that_their_time_is_known() -> None:
    budget = StepBudget()
    for _ in range(PROBE):
        assert budget.prefill_s(8, 1) > 0
        budget.observe(0.03, 8, 0, [ChunkSize(8, 0)])
    assert budget.prefill_s(8, 1) == 0
    budget.observe(0.02, 8, 0, [])
    assert budget.prefill_s(8, 1) > 0


def _step_s(num_tokens: int) -> float:
    """What SmolLM2 takes on two cores for so many rows and guesses, about."""
    return 0.0037 + 0.0007 * num_tokens


def test_draft_token_has_to_be_likelier_the_more_sequences_wait_for_it() -> None:
    budget = _taught(_step_s(8), 0.0007, 0)
    for num_rows, gain in (
        (1, 1.0),
        (8, GAIN),
        (32, GAIN),
    ):  # as if it cost what a prompt's token does
        expected = gain * num_rows * 0.0007 / _step_s(num_rows)
        assert budget.min_acceptance(num_rows) == pytest.approx(expected, rel=0.3)
    for step in range(500):
        budget.observe(0.02 + step % 3 * 0.0015, 8, step % 3, [])
    expected = GAIN * 8 * 0.0015 / 0.02
    assert budget.min_acceptance(8) == pytest.approx(expected, rel=0.1), "what it really costs"


def test_cost_of_a_draft_token_is_known_while_sequences_leave_and_all_steps_have_drafts() -> None:
    """Steps become shorter then, and that isn't because guesses cost nothing."""
    budget, rng = StepBudget(), random.Random(2)
    for num_rows in range(32, 0, -1):
        for _ in range(3):
            num_draft_tokens = rng.randint(1, 6)
            blur = rng.uniform(0.95, 1.05)
            budget.observe(
                blur * _step_s(num_rows + num_draft_tokens), num_rows, num_draft_tokens, []
            )
        if num_rows < 30:
            expected = num_rows * 0.0007 / _step_s(num_rows)
            rate = budget.min_acceptance(num_rows) / (GAIN if num_rows > 1 else 1)
            assert rate == pytest.approx(expected, rel=0.4)


def test_jump_forward_tokens_make_others_wait_for_a_tenth_of_a_step_and_no_longer() -> None:
    budget = StepBudget()
    for num_rows in [1, 8, 32] * 20:
        budget.observe(_step_s(num_rows), num_rows, 0, [])
    assert budget.num_jump_forward(1) == MAX_JUMP_FORWARD, "there are no others"
    assert budget.num_jump_forward(2) == budget.num_jump_forward(16) == 3, "nobody notices 2.5 ms"
    assert budget.num_jump_forward(32) == 0, "one by one they take hardly longer"
    for num_rows in [1, 8, 32] * 200:
        budget.observe(0.1 + 0.001 * num_rows, num_rows, 0, [])
    assert budget.num_jump_forward(32) == pytest.approx(0.1 * 0.132 / 0.001, abs=1)


def test_clock_that_stands_still_breaks_nothing() -> None:
    budget = StepBudget()
    for _ in range(50):
        budget.observe(0.0, 1, 1, [ChunkSize(8, 5)])
        budget.observe(0.0, 1, 0, [])
        budget.observe(0.0, 0, 0, [ChunkSize(8, 5)])
    assert budget.num_affordable(0.1, 100) > 0
    assert budget.cost_s(10, 10) >= 0


LIMITS = Limits(max_num_seqs=4, context=32, num_blocks=16, block_size=4)


def test_oldest_does_not_wait_for_another_that_has_more_of_the_same_block() -> None:
    """That one may find no block of its own to write, and only the oldest may preempt."""
    blocks = BlockTables(LIMITS)
    prefill = PrefillScheduler(blocks, StepBudget(), LIMITS)
    requests = [Request(request_id=name, prompt_ids=(*range(20),)) for name in "abc"]
    groups = [make_group(request, LIMITS.context, blocks) for request in requests]
    for group in groups:
        prefill.enter(group)
    (oldest,), (ahead,), (youngest,) = (group.sequences for group in groups)
    ahead.blocks, ahead.num_computed = [blocks.pool.take()], 3
    chunk_sizes = prefill.schedule(groups, 0)
    assert oldest in chunk_sizes
    assert youngest not in chunk_sizes, "all others wait"
