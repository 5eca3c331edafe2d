"""The tasks that every contender does.

Knows: lengths and numbers of rows. Does not know: contenders, clocks.
"""

import random
from collections.abc import Iterable, Sequence

from quill.loadtest.bench.contest import Task

PAST_TOKENS = 64  # in every row before the decode steps that are timed
PREFILLS = (128, 512)
LONG_PREFILLS = (512, 2048, 8000)
ALL_ROWS = (1, 2, 4, 8, 16, 32)
PEER_ROWS = (1, 8, 32)
RAGGED_ROWS = 8
RAGGED_LENGTHS = (16, 512)  # the shortest and the longest prompt
MIN_STEPS = 4
TOKENS_A_TURN = 64  # so many steps that a turn is long enough to be timed, and no longer


def random_ids(num: int, vocab_size: int) -> list[int]:
    chance = random.Random(0)
    return [chance.randrange(vocab_size) for _ in range(num)]


def prefill_tasks(
    ids: Sequence[int], context: int, lengths: Iterable[int] = PREFILLS
) -> list[Task]:
    """Prompts that leave room for an answer."""
    return [_prefill(ids, num) for num in lengths if num < min(context, len(ids))]


def _prefill(ids: Sequence[int], num: int) -> Task:
    return Task(f"prefill {num}", {"do": "prefill", "ids": list(ids[:num])}, num)


def decode_tasks(ids: Sequence[int], rows: Iterable[int]) -> list[Task]:
    return [_decode(ids, num_rows) for num_rows in rows]


def engine_tasks(ids: Sequence[int], context: int) -> list[Task]:
    """All that only Quill is asked: every number of rows, ragged prompts, sampling."""
    return [
        *prefill_tasks(ids, context),
        *decode_tasks(ids, ALL_ROWS),
        _ragged(ids, RAGGED_ROWS, context),
        _decode(ids, ALL_ROWS[-1], sampling="drawn"),
        _decode(ids, ALL_ROWS[-1], sampling="cut"),
    ]


def _decode(ids: Sequence[int], num_rows: int, **wishes: str) -> Task:
    num_steps = _num_steps(num_rows)
    order = {"do": "decode", "ids": list(ids[:PAST_TOKENS]), "num_rows": num_rows} | wishes
    name = wishes.get("sampling", "decode")
    return Task(f"{name} {num_rows}", order | {"num_steps": num_steps}, num_rows * num_steps)


def _ragged(ids: Sequence[int], num_rows: int, context: int) -> Task:
    shortest, longest = RAGGED_LENGTHS
    longest = min(longest, context // 2)
    lengths = [shortest + (longest - shortest) * i // (num_rows - 1) for i in range(num_rows)]
    prompts = [list(ids[:length]) for length in lengths]
    num_steps = _num_steps(num_rows)
    order = {"do": "ragged", "prompts": prompts, "num_steps": num_steps}
    return Task(f"ragged {num_rows}", order, num_rows * num_steps)


def _num_steps(num_rows: int) -> int:
    return max(MIN_STEPS, TOKENS_A_TURN // (2 * num_rows))
