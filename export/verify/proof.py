"""The proof that goes into the manifest: verification, perplexity and invariance of each precision.

Knows: what must hold for each precision before a bundle may exist.
Does not know: how graphs are made or written.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from quill.export.bundle.manifest import Graphs, Sizes, Verification
from quill.export.errors import VerificationError
from quill.export.precisions import MAX_RISE_FROM_SOURCE, PRECISIONS, Precision
from quill.export.quantize.quantization import Quantization, dequantized
from quill.export.verify.batch_invariance import MAX_PROMPT, NUM_SLOTS, measure_invariance
from quill.export.verify.compare import NUM_PROBES, check_graphs, probes
from quill.export.verify.held_out import HeldOut, Passage
from quill.export.verify.perplexity import replay, step_ms
from quill.export.verify.pytorch_reference import Answer, Oracle, Surprise, joined
from quill.export.verify.runner import Runner
from quill.model.checkpoint.checkpoint import Checkpoint

Tick = Callable[[], None]  # one more thing is done


def enough(passages: list[Passage], num_tokens: int | None) -> list[Passage]:
    """The first passages that have so many tokens together; all of them if None."""
    if num_tokens is None:
        return passages
    totals = itertools.accumulate(len(passage.ids) for passage in passages)
    return passages[: 1 + sum(total < num_tokens for total in totals)]


class Proof:
    """PyTorch's side, computed once; each precision is then held against it."""

    def __init__(self, checkpoint: Checkpoint, text: HeldOut, tick: Tick) -> None:
        self._checkpoint = checkpoint
        self._held_out = text
        oracle = Oracle(checkpoint)
        self._answers = probes(oracle, text, checkpoint.config.context, tick)
        self._surprises = []
        for passage in text.passages:
            self._surprises.append(oracle.surprise(passage))
            tick()

    @staticmethod
    def num_questions(text: HeldOut) -> int:
        """Ticks that asking PyTorch takes."""
        return NUM_PROBES + len(text.passages)

    def num_checks(self, precision: Precision) -> int:
        """Ticks that the proof of a precision takes."""
        return 2 + len(self._passages(precision))

    def prove(
        self,
        directory: Path,
        sizes: Sizes,
        graphs: Graphs,
        runnable: Graphs,
        quantization: Quantization | None,
        tick: Tick,
    ) -> Graphs:
        """The same graphs with what was measured. Refuses those that aren't good enough.

        `runnable`: the graphs as this machine can run them.
        """
        runner = Runner(directory, runnable, sizes, NUM_SLOTS, self._capacity())
        worst = check_graphs(runner, self._answers_for(quantization), graphs.precision)
        tick()
        passages = self._passages(graphs.precision)
        found = replay(runner, passages, tick)
        expected = joined(self._surprises[: len(passages)])
        check_rise(graphs.precision, found, expected, quantization)
        verification = Verification(
            worst_difference=worst,
            greedy_agreement=float(np.mean(found.favourites == expected.favourites)),
            perplexity=found.perplexity,
            reference_perplexity=expected.perplexity,
            text=self._held_out.name,
            num_tokens=len(found.nll),
            step_ms=step_ms(runner, passages[0]),
        )
        invariance = measure_invariance(runner, passages) if graphs.device == "cpu" else None
        tick()
        return replace(graphs, verification=verification, invariance=invariance)

    def _passages(self, precision: Precision) -> list[Passage]:
        return enough(self._held_out.passages, PRECISIONS[precision].max_tokens)

    def _answers_for(self, quantization: Quantization | None) -> list[Answer]:
        """PyTorch's answers with the very weights of the graphs."""
        if quantization is None or quantization.is_source:
            return self._answers
        oracle = Oracle(dequantized(self._checkpoint, quantization))
        return [oracle.answer(answer.passage) for answer in self._answers]

    def _capacity(self) -> int:
        """Room for every passage and for the longest prompt that is cut."""
        passages = [*self._held_out.passages, *(answer.passage for answer in self._answers)]
        longest = max(max(len(passage.ids), len(passage.source)) for passage in passages)
        return max(longest, min(MAX_PROMPT, self._checkpoint.config.context))


def check_rise(
    precision: Precision, found: Surprise, expected: Surprise, quantization: Quantization | None
) -> None:
    allowed = PRECISIONS[precision].max_rise
    if quantization is not None and quantization.is_source:
        allowed = MAX_RISE_FROM_SOURCE
    rise = found.perplexity / expected.perplexity - 1
    if allowed is not None and not rise <= allowed:
        raise VerificationError(
            f"the {precision} graph's perplexity is {found.perplexity:.4f}, {rise:.2%} above "
            f"PyTorch's {expected.perplexity:.4f}; {allowed:.2%} is allowed"
        )
