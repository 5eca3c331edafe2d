"""Compares what the graphs compute with what PyTorch computes, within a tolerance.

Knows: what a server does with the graphs (prefill, chunked prefill, decode, ragged batches, mixed
steps). Does not know: how the graphs were made, the tolerance (export/precisions.py).

Differences are in standard deviations of PyTorch's logits at the same position, so that they mean
the same for every model. Keys and values are compared, too: rotating all positions by the same
angle leaves every logit as it was, and would still break a cache that something else filled.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from quill.export.errors import VerificationError
from quill.export.precisions import PRECISIONS, Precision, Tolerance
from quill.export.verify.held_out import HeldOut, Passage
from quill.export.verify.pytorch_reference import Array, PyTorchReference, ReferenceOutput
from quill.export.verify.runner import Chunk, Runner

# T tokens · V vocabulary

NUM_PROBES = 3
NUM_STEPS = 64
NUM_RAGGED_STEPS = 8
MAX_PROBE = 112  # tokens: the decode steps, and a prompt before them


class Comparison(NamedTuple):
    """What the graphs and PyTorch compute in one situation."""

    situation: str
    found: Array  # (positions, numbers of a position)
    expected: Array

    def differences(self) -> Array:
        """The largest difference at each position."""
        spread = self.expected.std(axis=1)
        largest = np.abs(self.found - self.expected).max(axis=1)
        relative: Array = largest / np.maximum(spread, 1e-30)
        return relative


def probes(
    reference: PyTorchReference,
    held_out: HeldOut,
    context: int,
    tick: Callable[[], None] = lambda: None,
) -> list[ReferenceOutput]:
    """PyTorch's outputs of passages of different lengths."""
    longest = min(MAX_PROBE, context)
    lengths = (longest, longest * 2 // 3, longest // 2)
    assert len(lengths) == NUM_PROBES
    outputs = []
    for index, length in enumerate(lengths):
        passage = held_out.passages[index % len(held_out.passages)]
        cut = Passage(passage.ids[:length], passage.source)
        # A seq2seq target may be a word or two: greedy decoding makes it longer.
        outputs.append(reference.output(reference.greedy(cut, length - len(cut.ids))))
        tick()
    return outputs


def check_comparisons(comparisons: Iterable[Comparison], precision: Precision) -> float:
    """Raises an error for a difference beyond the tolerance. Returns the worst of any logit."""
    tolerance, worst = PRECISIONS[precision].tolerance, 0.0
    for comparison in comparisons:
        differences = comparison.differences()
        _check(comparison.situation, differences, tolerance, precision)
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


def compare(runner: Runner, outputs: list[ReferenceOutput]) -> Iterator[Comparison]:
    """Compares every situation that a server brings about."""
    if outputs[0].passage.source:
        runner.encode({slot: output.passage.source for slot, output in enumerate(outputs)})
        for slot, output in enumerate(outputs):
            yield from _caches(
                "cache of the source", runner.source_keys_and_values(slot), output.cross_caches
            )
    yield _prefilled(runner, outputs[0])
    if len(runner.hidden_LD):
        yield Comparison("hidden states in prefill", runner.hidden_LD, outputs[0].hidden_TD)
    yield _chunked(runner, outputs[0])
    yield _decoded(runner, outputs[0])
    yield from _caches("cache", runner.keys_and_values(0), outputs[0].caches)
    yield from _ragged(runner, outputs)


def _start(runner: Runner, slot: int, output: ReferenceOutput, length: int) -> None:
    """Prefills a slot with the first `length` tokens of a passage."""
    runner.rewind(slot)
    runner.prefill(slot, output.passage.ids[:length])


def _prefilled(runner: Runner, output: ReferenceOutput) -> Comparison:
    ids = output.passage.ids
    runner.rewind(0)
    return Comparison("in prefill", runner.prefill(0, ids, range(len(ids))), output.logits_TV)


def _chunked(runner: Runner, output: ReferenceOutput) -> Comparison:
    """Chunks of 1, 2, 3, 5, 8 … tokens, and the rest in one."""
    ids, found, start, size, following = output.passage.ids, [], 0, 1, 2
    runner.rewind(0)
    while start < len(ids):
        if len(ids) - start - size < size:
            size = len(ids) - start
        found.append(runner.prefill(0, ids[start : start + size], range(size)))
        start, size, following = start + size, following, size + following
    return Comparison("in prefill by chunks", np.concatenate(found), output.logits_TV)


def _decoded(runner: Runner, output: ReferenceOutput) -> Comparison:
    ids = output.passage.ids
    num_steps = min(NUM_STEPS, len(ids) - 2)
    first = len(ids) - num_steps
    _start(runner, 0, output, first)
    found = [runner.decode([token]) for token in ids[first:]]
    return Comparison(
        f"in {num_steps} decode steps", np.concatenate(found), output.logits_TV[first:]
    )


def _ragged(runner: Runner, outputs: list[ReferenceOutput]) -> Iterator[Comparison]:
    """Three sequences of different lengths; then the first restarts while the others continue."""
    half = NUM_RAGGED_STEPS // 2
    half = min(half, min(len(output.passage.ids) for output in outputs) // 4)
    for slot, output in enumerate(outputs):
        _start(runner, slot, output, len(output.passage.ids) - 2 * half)
    yield _steps("in ragged batches", runner, outputs, range(half))
    runner.rewind(0)
    yield _steps("in mixed steps", runner, outputs, range(half), chunk=5)


def _steps(
    situation: str, runner: Runner, outputs: list[ReferenceOutput], steps: range, chunk: int = 1
) -> Comparison:
    """Each sequence continues by a token a step; the first by a chunk."""
    found, expected = [], []
    for _ in steps:
        chunks = []
        for slot, output in enumerate(outputs):
            past, num = runner.length(slot), 1 if slot else chunk
            chunks.append(Chunk(slot, output.passage.ids[past : past + num], range(num)))
            expected.append(output.logits_TV[past : past + num])
        found.append(runner.step(chunks))
    return Comparison(situation, np.concatenate(found), np.concatenate(expected))


def _caches(situation: str, found: list[Array], expected: list[Array]) -> Iterator[Comparison]:
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        side = f"{situation}, {('keys', 'values')[index % 2]} of layer {index // 2}"
        yield Comparison(side, _by_position(ours), _by_position(theirs))


def _by_position(cache_KTH: Array) -> Array:
    return cache_KTH.swapaxes(0, 1).reshape(cache_KTH.shape[1], -1).astype(np.float32)
