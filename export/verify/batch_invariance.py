"""Measures batch invariance: does a sequence's result depend on what else is in the batch?

Knows: what a server does (batches of any size, a prompt in chunks of any size). Does not know:
PyTorch.

The server promises that the same seed gives the same tokens, alone or batched. The promise needs
kernels that compute each token's bits alike in every batch. ONNX Runtime doesn't guarantee that of
its kernels, so each export measures it, and the manifest has the result.
"""

import random
from collections.abc import Iterator, Sequence

import numpy as np

from quill.export.bundle.manifest import Invariance
from quill.export.verify.held_out import Passage
from quill.export.verify.projection import Array
from quill.export.verify.runner import Chunk, EncoderRunner, Runner

BATCH_SIZES = (1, 2, 3, 8, 32)
NUM_SLOTS = BATCH_SIZES[-1]
MAX_LENGTH = 64  # of the sequences that are compared
MAX_PROMPT = 300  # that is chunked: longer than two of attention's tiles of 128 positions
NUM_CUTS = 4
NUM_BATCHES = 6  # of each size that a text is encoded in
MAX_CHUNK = 40  # tokens
MAX_OTHERS = 4  # other sequences in the step of a chunk


def measure_invariance(runner: Runner, passages: Sequence[Passage]) -> Invariance:
    """Of a decoder. `runner` has at least 32 slots; any passages fill them."""
    prompts = _prompts(passages)
    ids = [token for passage in passages for token in passage.ids]
    ids = ids[: min(MAX_PROMPT, runner.capacity)]
    holds = (
        _sources_agree(runner, prompts)
        and _batches_agree(runner, prompts)
        and _cuts_agree(runner, ids, prompts)
    )
    return Invariance(holds=holds, rows=BATCH_SIZES, num_cut_tokens=len(ids))


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
    """Whether sources in one batch give the same bits as each alone. They stay cached."""
    if not prompts[0].source:
        return True
    runner.encode({slot: prompt.source for slot, prompt in enumerate(prompts)})
    for slot in (0, NUM_SLOTS // 2, NUM_SLOTS - 1):
        together = runner.source_keys_and_values(slot)
        runner.encode({slot: prompts[slot].source})
        if not all(map(np.array_equal, runner.source_keys_and_values(slot), together)):
            return False
    return True


def _batches_agree(runner: Runner, prompts: list[Passage]) -> bool:
    """Whether sequences have the same logits in every batch size."""
    for slot, prompt in enumerate(prompts):
        runner.rewind(slot)
        runner.prefill(slot, prompt.ids[:-1])
    batched = _decode(runner, prompts, 0, NUM_SLOTS)
    # The first sequences and the last ones: a result may depend on the place, too.
    return all(
        np.array_equal(_decode(runner, prompts, at, num), batched[at : at + num])
        for num in BATCH_SIZES
        for at in (0, NUM_SLOTS - num)
    )


def _decode(runner: Runner, prompts: list[Passage], first: int, num_sequences: int) -> Array:
    slots = range(first, first + num_sequences)
    for slot in slots:
        runner.rewind(slot, len(prompts[slot].ids) - 1)
    return runner.decode([prompts[slot].ids[-1] for slot in slots], first)


def _cuts_agree(runner: Runner, ids: list[int], prompts: list[Passage]) -> bool:
    """Whether a chunked prompt, in mixed steps, gives the same logits, keys and values as one
    prefill."""
    rng = random.Random(0)
    runner.rewind(0)
    whole, hidden = runner.prefill(0, ids, range(len(ids))), runner.hidden_LD
    expected = runner.keys_and_values(0)
    for _ in range(NUM_CUTS):
        runner.rewind(0)
        start = 0
        for chunk in _cut(ids, rng):
            part = slice(start, start + len(chunk))
            found, start = _run_batched(runner, chunk, prompts, rng), part.stop
            if not np.array_equal(found, whole[part]):
                return False
            if not np.array_equal(runner.hidden_LD, hidden[part]):
                return False
        if not all(map(np.array_equal, runner.keys_and_values(0), expected)):
            return False
    return True


def _cut(ids: list[int], rng: random.Random) -> Iterator[list[int]]:
    """Chunks of random sizes, every third of them a single token."""
    start = 0
    while start < len(ids):
        size = 1 if rng.random() < 1 / 3 else rng.randint(1, MAX_CHUNK)
        yield ids[start : start + size]
        start += size


def _run_batched(
    runner: Runner, ids: list[int], prompts: list[Passage], rng: random.Random
) -> Array:
    """The logits of one chunk of slot 0, in a step with other slots before and after it."""
    chunks = [Chunk(0, ids, range(len(ids)))]
    for slot in rng.sample(range(1, NUM_SLOTS), rng.randint(0, MAX_OTHERS)):
        past = rng.randrange(len(prompts[slot].ids))
        runner.rewind(slot, past)
        last = rng.randint(past + 1, len(prompts[slot].ids))
        chunks.insert(rng.randint(0, len(chunks)), Chunk(slot, prompts[slot].ids[past:last], []))
    logits_LV: Array = runner.step(chunks)
    return logits_LV


def measure_encoder_invariance(runner: EncoderRunner, texts: Sequence[Sequence[int]]) -> Invariance:
    """Whether an encoder gives a text the same bits alone and in every batch."""
    longest = max(len(ids) for ids in texts)
    lengths = np.linspace(1, longest, NUM_SLOTS).astype(int).tolist()
    texts = [texts[slot % len(texts)][:length] for slot, length in enumerate(lengths)]
    places = [range(len(ids)) for ids in texts]
    single = [runner.encode([ids], [range(len(ids))])[0] for ids in texts]
    rng = random.Random(0)
    batches = [
        rng.sample(range(NUM_SLOTS), size) for size in BATCH_SIZES for _ in range(NUM_BATCHES)
    ]
    holds = all(
        np.array_equal(found.hidden_TD, single[slot].hidden_TD)
        and np.array_equal(found.logits_LV, single[slot].logits_LV)
        for slots in batches
        for slot, found in zip(
            slots,
            runner.encode([texts[slot] for slot in slots], [places[slot] for slot in slots]),
            strict=True,
        )
    )
    return Invariance(holds=holds, rows=BATCH_SIZES, num_cut_tokens=0)
