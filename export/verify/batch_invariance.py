"""Measures batch invariance: do a row's logits depend on what else is in the batch, to the bit?

Knows: the two promises (any number of rows; prefill cut anywhere). Does not know: PyTorch.

The server promises that the same seed gives the same tokens alone and in a crowd. It rests on
kernels that treat each row alike however many there are. Nobody guarantees that: it is measured at
every export, and the manifest says what held. The rule about tiles is in
export/bundle/graph_contract.py: on SmolLM2, a prompt of 300 tokens cut at 129 moves its logits by
3e-5 in fp32 and by 0.5 in int4.
"""

import random
from collections.abc import Sequence

import numpy as np

from quill.export.bundle.manifest import TILE, Invariance, is_lone_tail
from quill.export.verify.held_out import Passage
from quill.export.verify.pytorch_reference import Array
from quill.export.verify.runner import Runner

ROWS = (1, 2, 3, 8, 32)
NUM_SLOTS = ROWS[-1]
MIN_CHUNK = 2  # one token takes the decode kernel
MAX_LENGTH = 64  # of the rows that are compared
MAX_PROMPT = 300  # that is cut: longer than two tiles of every kernel
NUM_CUTS = 4


def measure_invariance(runner: Runner, passages: Sequence[Passage]) -> Invariance:
    """`runner` has at least 32 slots; `passages` of any number and length fill them."""
    prompts = _prompts(passages)
    exact = _exact_rows(runner, prompts)
    # The fewest rows from which on every larger number agrees.
    min_rows = next(n for i, n in enumerate(ROWS) if all(exact[m] for m in ROWS[i:]))
    chunks_agree = bool(passages[0].source) or _chunks_agree(runner, passages)
    return Invariance(
        holds=min_rows <= MIN_CHUNK and chunks_agree,
        min_rows=min_rows,
        min_chunk=MIN_CHUNK,
        tile=TILE,
        rows=ROWS,
    )


def _prompts(passages: Sequence[Passage]) -> list[Passage]:
    """One for each slot, all of different lengths where the passages allow it."""
    prompts = []
    for slot in range(NUM_SLOTS):
        passage = passages[slot % len(passages)]
        start = 0 if passage.source else slot // len(passages) % (len(passage.ids) // 2)
        ids = passage.ids[start : start + min(MAX_LENGTH, 3 + 2 * slot)]
        prompts.append(Passage(ids, passage.source))
    return prompts


def _exact_rows(runner: Runner, prompts: list[Passage]) -> dict[int, bool]:
    """For each number of rows: do they get the logits that they get among all?"""
    for slot, prompt in enumerate(prompts):
        runner.rewind(slot)
        if prompt.source:
            runner.encode(slot, prompt.source)
            for token in prompt.ids[:-1]:
                runner.decode([token], slot)
        else:
            runner.prefill(slot, prompt.ids[:-1])
    crowd = _decode(runner, prompts, 0, NUM_SLOTS)
    exact = {}
    for num_rows in ROWS:
        # The first rows and the last ones: a row may depend on its place as well.
        places = (0, NUM_SLOTS - num_rows)
        exact[num_rows] = all(
            np.array_equal(_decode(runner, prompts, at, num_rows), crowd[at : at + num_rows])
            for at in places
        )
    return exact


def _decode(runner: Runner, prompts: list[Passage], first: int, num_rows: int) -> Array:
    slots = range(first, first + num_rows)
    for slot in slots:
        runner.rewind(slot, len(prompts[slot].ids) - 1)
    return runner.decode([prompts[slot].ids[-1] for slot in slots], first)


def _chunks_agree(runner: Runner, passages: Sequence[Passage]) -> bool:
    """Is prefill in chunks the same as at once, in logits, keys and values?"""
    chance = random.Random(0)
    ids = _prompt(passages, min(MAX_PROMPT, runner.capacity))
    runner.rewind(0)
    whole = runner.prefill(0, ids, range(len(ids)))
    for _ in range(NUM_CUTS):
        runner.rewind(1)
        parts = [runner.prefill(1, chunk, range(len(chunk))) for chunk in _cut(ids, chance)]
        caches = zip(runner.keys_and_values(0), runner.keys_and_values(1), strict=True)
        same = all(np.array_equal(ours, theirs) for ours, theirs in caches)
        if not same or not np.array_equal(np.concatenate(parts), whole):
            return False
    return True


def _prompt(passages: Sequence[Passage], max_length: int) -> list[int]:
    ids = [token for passage in passages for token in passage.ids][:max_length]
    return ids[:-MIN_CHUNK] if is_lone_tail(len(ids)) else ids


def _cut(ids: list[int], chance: random.Random) -> list[list[int]]:
    """Chunks of random sizes that leave no token alone."""
    chunks, start = [], 0
    while start < len(ids):
        remaining = len(ids) - start
        sizes = [n for n in range(MIN_CHUNK, remaining + 1) if _may_cut(n, remaining)]
        size = chance.choice(sizes)
        chunks.append(ids[start : start + size])
        start += size
    return chunks


def _may_cut(size: int, remaining: int) -> bool:
    return not is_lone_tail(size) and remaining - size != 1
