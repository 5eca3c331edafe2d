"""Compares what the graphs compute with what PyTorch computes, within a tolerance.

Knows: what a server does with the graphs (prefill, chunked prefill, decode, ragged batches, mixed
steps). Does not know: how the graphs were made, the tolerance (export/precisions.py).

Differences are in standard deviations of PyTorch's logits at the same position, so that they mean
the same for every model. Keys and values are compared, too: rotating all positions by the same
angle leaves every logit as it was, and would still break a cache that something else filled.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from quill.export.bundle.graph_contract import BLOCK
from quill.export.errors import VerificationError
from quill.export.precisions import Precision, Tolerance
from quill.export.verify.held_out import HeldOut, Passage
from quill.export.verify.probe_attention import past_split
from quill.export.verify.projection import Array
from quill.export.verify.pytorch_reference import PyTorchReference, ReferenceOutput
from quill.export.verify.runner import Chunk, Runner
from quill.model.network.config import ModelConfig

# T tokens · V vocabulary

NUM_PROBES = 3
NUM_STEPS = 64
NUM_RAGGED_STEPS = 8
MAX_PROBE = 112  # tokens: the decode steps, and a prompt before them
NUM_AT_ONCE = 16  # positions whose numbers are compared together
NUM_FAR_TOKENS = 32  # of each passage far from the start
FIRST_FAR = 256
FAR_FACTOR = 2  # a past that repeats itself makes large differences larger: 0.92 in SmolLM2


class Comparison(NamedTuple):
    """What the graphs and PyTorch compute in one situation."""

    situation: str
    found: Array  # (positions, numbers of a position)
    expected: Array

    def differences(self) -> Array:
        """The largest difference at each position; few at a time, to take little memory."""
        starts = range(0, len(self.found), NUM_AT_ONCE)
        return np.concatenate([self._differences(slice(at, at + NUM_AT_ONCE)) for at in starts])

    def _differences(self, some: slice) -> Array:
        spread = self.expected[some].std(axis=1)
        largest = np.abs(self.found[some] - self.expected[some]).max(axis=1)
        relative: Array = largest / np.maximum(spread, 1e-30)
        return relative


def probes(reference: PyTorchReference, held_out: HeldOut, context: int) -> list[Passage]:
    """Passages of different lengths."""
    longest = min(MAX_PROBE, context)
    lengths = (longest, longest * 2 // 3, longest // 2)
    assert len(lengths) == NUM_PROBES
    found = []
    for index, length in enumerate(lengths):
        passage = held_out.passages[index % len(held_out.passages)]
        cut = Passage(passage.ids[:length], passage.source)
        # A seq2seq target may be a word or two: greedy decoding makes it longer.
        found.append(reference.greedy(cut, length - len(cut.ids)))
    return found


def far_probes(config: ModelConfig, held_out: HeldOut) -> list[Passage]:
    """Passages far from the start: at powers of two, across the edge of the window, and up to the
    last position. Only causal Transformers have them."""
    if config.family != "causal" or config.recurrence is not None:
        return []
    pasts, edge = {config.window // BLOCK * BLOCK}, FIRST_FAR
    while edge < config.context:
        pasts.add(edge - BLOCK)
        edge *= 2
    pasts.add((config.context - 1) // BLOCK * BLOCK - BLOCK)
    found = []
    for index, past in enumerate(sorted(past for past in pasts if 0 < past < config.context)):
        ids = held_out.passages[index % len(held_out.passages)].ids[:NUM_FAR_TOKENS]
        found.append(Passage(ids[: config.context - past], past=past))
    return found


def check_comparisons(
    comparisons: Iterable[Comparison], precision: Precision, tolerance: Tolerance
) -> float:
    """Raises an error for a difference beyond the tolerance. Returns the worst of any logit."""
    worst = 0.0
    for comparison in comparisons:
        differences = comparison.differences()
        allowed = tolerance
        if comparison.situation.startswith("at positions"):
            allowed = replace(tolerance, worst=FAR_FACTOR * tolerance.worst)
        _check(comparison.situation, differences, allowed, precision)
        if not comparison.situation.startswith("cache"):
            worst = max(worst, float(differences.max()))
    return worst


def _check(situation: str, differences: Array, allowed: Tolerance, precision: Precision) -> None:
    worst, mean = float(differences.max()), float(differences.mean())
    if not (worst <= allowed.worst and mean <= allowed.mean):  # also when they are NaN
        raise VerificationError(
            f"the {precision} graph doesn't compute what PyTorch computes: {situation}, the worst "
            f"difference is {worst:.2g} and the mean {mean:.2g} of the spread; {allowed.worst:g} "
            f"and {allowed.mean:g} are allowed"
        )


def compare(
    runner: Runner, reference: PyTorchReference, outputs: Sequence[ReferenceOutput], window: int = 0
) -> Iterator[Comparison]:
    """Compares every situation that a server brings about. `outputs`: of the probes, and then of
    passages far from the start."""
    near, far = outputs[:NUM_PROBES], outputs[NUM_PROBES:]
    if near[0].passage.source:
        runner.encode({slot: output.passage.source for slot, output in enumerate(near)})
        for slot, output in enumerate(near):
            yield from _caches(
                "cache of the source", runner.source_keys_and_values(slot), output.cross_caches
            )
    logits_TV = reference.project(near[0].hidden_TD)
    yield _prefilled(runner, near[0], logits_TV)
    if len(runner.hidden_LD):
        yield Comparison("hidden states in prefill", runner.hidden_LD, near[0].hidden_TD)
    yield _chunked(runner, near[0], logits_TV)
    yield _decoded(runner, near[0], logits_TV)
    yield from _caches("cache", runner.keys_and_values(0), near[0].caches)
    yield from _ragged(runner, reference, near)
    if far:
        yield from _far(runner, reference, outputs, window)


def _far(
    runner: Runner, reference: PyTorchReference, outputs: Sequence[ReferenceOutput], window: int
) -> Iterator[Comparison]:
    """Few tokens after a past of any length, which repeats two blocks."""
    for slot, output in enumerate(outputs[:2]):
        _start(runner, slot, output, BLOCK)
    chunks, pasts, far = [], [], outputs[NUM_PROBES:]
    for slot, output in enumerate(far, 2):
        ids, past = output.passage.ids, output.passage.past
        chunks.append(Chunk(slot, ids, range(len(ids))))
        blocks = np.full(past // BLOCK, runner.first_block(0))
        blocks[: past_split(past, window) // BLOCK] = runner.first_block(1)
        pasts.append(blocks)
    found = runner.continue_blocks(chunks, pasts)
    expected = reference.project(np.concatenate([output.hidden_TD for output in far]))
    ends = np.cumsum([len(output.passage.ids) for output in far])[:-1]
    for slot, (output, *both) in enumerate(
        zip(far, np.split(found, ends), np.split(expected, ends), strict=True), 2
    ):
        first = output.passage.past
        situation = f"positions {first} to {first + len(output.passage.ids) - 1}"
        yield Comparison(f"at {situation}", *both)
        yield from _caches(f"cache of {situation}", runner.keys_and_values(slot), output.caches)


def _start(runner: Runner, slot: int, output: ReferenceOutput, length: int) -> None:
    """Prefills a slot with the first `length` tokens of a passage."""
    runner.rewind(slot)
    runner.prefill(slot, output.passage.ids[:length])


def _prefilled(runner: Runner, output: ReferenceOutput, logits_TV: Array) -> Comparison:
    ids = output.passage.ids
    runner.rewind(0)
    return Comparison("in prefill", runner.prefill(0, ids, range(len(ids))), logits_TV)


def _chunked(runner: Runner, output: ReferenceOutput, logits_TV: Array) -> Comparison:
    """Chunks of 1, 2, 3, 5, 8 … tokens, and the rest in one."""
    ids, found, start, size, following = output.passage.ids, [], 0, 1, 2
    runner.rewind(0)
    while start < len(ids):
        if len(ids) - start - size < size:
            size = len(ids) - start
        found.append(runner.prefill(0, ids[start : start + size], range(size)))
        start, size, following = start + size, following, size + following
    return Comparison("in prefill by chunks", np.concatenate(found), logits_TV)


def _decoded(runner: Runner, output: ReferenceOutput, logits_TV: Array) -> Comparison:
    ids = output.passage.ids
    num_steps = min(NUM_STEPS, len(ids) - 2)
    first = len(ids) - num_steps
    _start(runner, 0, output, first)
    found = [runner.decode([token]) for token in ids[first:]]
    return Comparison(f"in {num_steps} decode steps", np.concatenate(found), logits_TV[first:])


def _ragged(
    runner: Runner, reference: PyTorchReference, outputs: Sequence[ReferenceOutput]
) -> Iterator[Comparison]:
    """Three sequences of different lengths; then the first restarts while the others continue."""
    half = NUM_RAGGED_STEPS // 2
    half = min(half, min(len(output.passage.ids) for output in outputs) // 4)
    for slot, output in enumerate(outputs):
        _start(runner, slot, output, len(output.passage.ids) - 2 * half)
    for situation, chunk in (("in ragged batches", 1), ("in mixed steps", 5)):
        if chunk > 1:
            runner.rewind(0)
        found, hidden = _steps(runner, outputs, range(half), chunk)
        yield Comparison(situation, found, reference.project(hidden))


def _steps(
    runner: Runner, outputs: Sequence[ReferenceOutput], steps: range, chunk: int
) -> tuple[Array, Array]:
    """Each sequence continues by a token a step; the first by a chunk. Returns the graph's logits
    and PyTorch's hidden states."""
    found, expected = [], []
    for _ in steps:
        chunks = []
        for slot, output in enumerate(outputs):
            past, num = runner.length(slot), 1 if slot else chunk
            chunks.append(Chunk(slot, output.passage.ids[past : past + num], range(num)))
            expected.append(output.hidden_TD[past : past + num])
        found.append(runner.step(chunks))
    return np.concatenate(found), np.concatenate(expected)


def _caches(situation: str, found: list[Array], expected: list[Array]) -> Iterator[Comparison]:
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        side = f"{situation}, {('keys', 'values')[index % 2]} of layer {index // 2}"
        yield Comparison(side, _by_position(ours), _by_position(theirs))


def _by_position(cache_KTH: Array) -> Array:
    return cache_KTH.swapaxes(0, 1).reshape(cache_KTH.shape[1], -1).astype(np.float32)
