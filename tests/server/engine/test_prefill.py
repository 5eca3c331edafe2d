"""Which prompts are prefilled, and which wait for blocks that another prompt computes."""

from quill.server.engine.block_pool import BlockTables
from quill.server.engine.prefill import PrefillScheduler
from quill.server.engine.step_budget import StepBudget
from quill.server.engine.strategies import make_group
from quill.server.request import Limits, Request

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
