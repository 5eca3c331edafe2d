"""Measures batch invariance: do a row's logits depend on what else is in the step, to the bit?

Knows: the promise (any company, a prompt cut anywhere). Does not know: PyTorch.

The server promises that the same seed gives the same tokens alone and in a crowd. It rests on
kernels that treat each token alike however many there are. Nobody guarantees that of the runtime's:
it is measured at every export, and the manifest says what held.
"""

import random
from collections.abc import Iterator, Sequence

import numpy as np

from quill.export.bundle.manifest import Invariance
from quill.export.verify.held_out import Passage
from quill.export.verify.pytorch_reference import Array
from quill.export.verify.runner import Piece, Runner

ROWS = (1, 2, 3, 8, 32)
NUM_SLOTS = ROWS[-1]
MAX_LENGTH = 64  # of the rows that are compared
MAX_PROMPT = 300  # that is cut: of more than two chunks of attention's 128 positions
NUM_CUTS = 4
MAX_PIECE = 40  # tokens
MAX_COMPANY = 4  # other rows in the step of a piece


def measure_invariance(runner: Runner, passages: Sequence[Passage]) -> Invariance:
    """`runner` has at least 32 slots; `passages` of any number and length fill them."""
    prompts = _prompts(passages)
    ids = [token for passage in passages for token in passage.ids]
    ids = ids[: min(MAX_PROMPT, runner.capacity)]
    holds = (
        _sources_agree(runner, prompts)
        and _rows_agree(runner, prompts)
        and _cuts_agree(runner, ids, prompts)
    )
    return Invariance(holds=holds, rows=ROWS, num_cut_tokens=len(ids))


def _prompts(passages: Sequence[Passage]) -> list[Passage]:
    """One for each slot, all of different lengths where the passages allow it."""
    prompts = []
    for slot in range(NUM_SLOTS):
        passage = passages[slot % len(passages)]
        start = 0 if passage.source else slot // len(passages) % (len(passage.ids) // 2)
        ids = passage.ids[start : start + min(MAX_LENGTH, 3 + 2 * slot)]
        prompts.append(Passage(ids, passage.source))
    return prompts


def _sources_agree(runner: Runner, prompts: list[Passage]) -> bool:
    """Are sources that are read together what each is alone? Leaves them parked."""
    if not prompts[0].source:
        return True
    runner.encode({slot: prompt.source for slot, prompt in enumerate(prompts)})
    for slot in (0, NUM_SLOTS // 2, NUM_SLOTS - 1):
        together = runner.parked(slot)
        runner.encode({slot: prompts[slot].source})
        if not all(map(np.array_equal, runner.parked(slot), together)):
            return False
    return True


def _rows_agree(runner: Runner, prompts: list[Passage]) -> bool:
    """Do rows get the logits in any number that they get among all?"""
    for slot, prompt in enumerate(prompts):
        runner.rewind(slot)
        runner.prefill(slot, prompt.ids[:-1])
    crowd = _decode(runner, prompts, 0, NUM_SLOTS)
    # The first rows and the last ones: a row may depend on its place as well.
    return all(
        np.array_equal(_decode(runner, prompts, at, num), crowd[at : at + num])
        for num in ROWS
        for at in (0, NUM_SLOTS - num)
    )


def _decode(runner: Runner, prompts: list[Passage], first: int, num_rows: int) -> Array:
    slots = range(first, first + num_rows)
    for slot in slots:
        runner.rewind(slot, len(prompts[slot].ids) - 1)
    return runner.decode([prompts[slot].ids[-1] for slot in slots], first)


def _cuts_agree(runner: Runner, ids: list[int], prompts: list[Passage]) -> bool:
    """Is a prompt in pieces, among others' pieces, the same as at once: logits, keys, values?"""
    chance = random.Random(0)
    runner.rewind(0)
    whole, hidden = runner.prefill(0, ids, range(len(ids))), runner.hidden_LD
    expected = runner.keys_and_values(0)
    for _ in range(NUM_CUTS):
        runner.rewind(0)
        found, shown = [], []
        for piece in _cut(ids, chance):
            found.append(_in_company(runner, piece, prompts, chance))
            shown.append(runner.hidden_LD)
        same = all(map(np.array_equal, runner.keys_and_values(0), expected))
        same = same and np.array_equal(np.concatenate(shown), hidden)
        if not same or not np.array_equal(np.concatenate(found), whole):
            return False
    return True


def _cut(ids: list[int], chance: random.Random) -> Iterator[list[int]]:
    """Pieces of random sizes, every third of them a single token."""
    start = 0
    while start < len(ids):
        size = 1 if chance.random() < 1 / 3 else chance.randint(1, MAX_PIECE)
        yield ids[start : start + size]
        start += size


def _in_company(
    runner: Runner, ids: list[int], prompts: list[Passage], chance: random.Random
) -> Array:
    """The logits of one piece of slot 0, in a step with others before and after it."""
    pieces = [Piece(0, ids, range(len(ids)))]
    for slot in chance.sample(range(1, NUM_SLOTS), chance.randint(0, MAX_COMPANY)):
        past = chance.randrange(len(prompts[slot].ids))
        runner.rewind(slot, past)
        last = chance.randint(past + 1, len(prompts[slot].ids))
        pieces.insert(chance.randint(0, len(pieces)), Piece(slot, prompts[slot].ids[past:last], []))
    logits_LV: Array = runner.step(pieces)
    return logits_LV
