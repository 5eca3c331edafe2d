"""Who reads, and who waits for what another reads."""

from quill.server.engine.block_pool import BlockPool
from quill.server.engine.prefill import PromptShares
from quill.server.engine.sequence import Group, group_of
from quill.server.engine.step_budget import StepBudget
from quill.server.limits import Limits
from quill.server.request import Request

LIMITS = Limits(max_num_seqs=4, context=32, num_blocks=16, block_size=4)


def _groups(shares: PromptShares, num_groups: int) -> list[Group]:
    """All with the same prompt; who is first is the oldest."""
    names = [str(number) for number in range(num_groups)]
    requests = [Request(request_id=name, prompt_ids=(*range(20),)) for name in names]
    groups = [group_of(request, LIMITS.context) for request in requests]
    for group in groups:
        shares.enter(group)
    return groups


def test_oldest_does_not_wait_for_who_has_more_of_the_same_block() -> None:
    """That one may find no block of its own to write; and others are set back for the oldest."""
    pool = BlockPool(LIMITS.num_blocks)
    shares = PromptShares(pool, StepBudget(), LIMITS)
    oldest, ahead, youngest = _groups(shares, 3)
    ahead.rows[0].blocks, ahead.rows[0].num_held = [pool.take()], 3
    given = shares.share([oldest, ahead, youngest], 0)
    assert oldest.rows[0] in given
    assert youngest.rows[0] not in given, "all others wait"
