"""Compares an encoder's graph with PyTorch: hidden states and masked tokens.

Knows: what is run of encoders. Does not know: limits (export/verify/verifier.py), how graphs are
made or written.

An encoder's perplexity is that of masked tokens, always the same ones. An encoder without a head
for masked tokens has no such number: the mean cosine distance of its hidden states to PyTorch's is
taken in its place, and e to that power stands for the perplexity, so that the same limits ask for a
cosine of 0.99 (what a server chooses by itself) or 0.995 (quill8).
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from quill.export.bundle.manifest import Sizes
from quill.export.precisions import PRECISIONS, Precision
from quill.export.quantize.quantization import Quantization
from quill.export.verify.batch_invariance import measure_encoder_invariance
from quill.export.verify.compare import Comparison, check_comparisons
from quill.export.verify.held_out import HeldOut, mask_passages
from quill.export.verify.pytorch_reference import PyTorchReference
from quill.export.verify.runner import EncoderOutput, EncoderRunner
from quill.export.verify.token_scores import TokenScores, score_tokens
from quill.export.verify.verifier import (
    NUM_TIMED_STEPS,
    Candidate,
    Measured,
    Scored,
    Tick,
    Verifier,
    check_rise,
    median_ms,
)
from quill.model.checkpoint.checkpoint import Checkpoint

NUM_PACKED = 4  # texts in one run of an encoder
NUM_TEXT_PROBES = 8  # texts of which an encoder's every number is compared


class EncoderVerifier(Verifier):
    """Of encoders: hidden states and masked tokens, of single texts and of packed texts."""

    def __init__(self, checkpoint: Checkpoint, sizes: Sizes, text: HeldOut) -> None:
        super().__init__(checkpoint, sizes, text)
        self._texts = mask_passages(checkpoint, text)
        self._outputs: list[EncoderOutput] = []  # PyTorch's; the first precision needs them

    def num_ticks(self, precision: Precision, quantization: Quantization | None) -> int:
        return 3 + (0 if self._outputs else len(self._texts))

    def _measure(self, candidate: Candidate, tick: Tick) -> Measured:
        if not self._outputs:
            self._run_pytorch(tick)
        texts, outputs = self._texts[:NUM_TEXT_PROBES], self._outputs[:NUM_TEXT_PROBES]
        if candidate.quantization is not None:
            reference = PyTorchReference(self._checkpoint, candidate.quantization)
            outputs = [reference.encode(text) for text in texts]
        runner = EncoderRunner(candidate.directory, candidate.runnable, self._sizes)
        single = [runner.encode([each.ids], [each.places])[0] for each in texts]
        packed = self._run_packed(runner)
        comparisons = itertools.chain(
            _compare_encoder("single", single, outputs),
            _compare_encoder("packed", packed[: len(texts)], outputs),
        )
        tolerance = PRECISIONS[candidate.precision].tolerance
        worst = check_comparisons(comparisons, candidate.precision, tolerance)
        tick()
        found, expected = self._score(packed), self._score(self._outputs)
        check_rise(candidate, found, expected)
        milliseconds = median_ms([lambda: runner.encode([self._texts[0].ids])] * NUM_TIMED_STEPS)
        tick()
        invariance = measure_encoder_invariance(runner, [each.ids for each in self._texts])
        tick()
        return Measured(worst, Scored(found, expected), milliseconds, invariance)

    def _run_pytorch(self, tick: Tick) -> None:
        reference = PyTorchReference(self._checkpoint)
        for masked in self._texts:
            self._outputs.append(reference.encode(masked))
            tick()

    def _run_packed(self, runner: EncoderRunner) -> list[EncoderOutput]:
        outputs: list[EncoderOutput] = []
        for start in range(0, len(self._texts), NUM_PACKED):
            some = self._texts[start : start + NUM_PACKED]
            outputs += runner.encode([each.ids for each in some], [each.places for each in some])
        return outputs

    def _score(self, outputs: Sequence[EncoderOutput]) -> TokenScores:
        if self._checkpoint.special_tokens.mask is None:
            return _cosine_distances(outputs, self._outputs)
        targets = [target for text in self._texts for target in text.targets]
        return score_tokens(np.concatenate([each.logits_LV for each in outputs]), targets)


def _compare_encoder(
    situation: str, found: Sequence[EncoderOutput], expected: Sequence[EncoderOutput]
) -> Iterator[Comparison]:
    for ours, theirs in zip(found, expected, strict=True):
        yield Comparison(f"hidden states, {situation}", ours.hidden_TD, theirs.hidden_TD)
        if len(theirs.logits_LV):
            yield Comparison(f"masked tokens, {situation}", ours.logits_LV, theirs.logits_LV)


def _cosine_distances(
    found: Sequence[EncoderOutput], expected: Sequence[EncoderOutput]
) -> TokenScores:
    """The cosine distance of each token's hidden state, and the index of its greatest number."""
    ours, theirs = (
        np.concatenate([each.hidden_TD for each in part]).astype(np.float64)
        for part in (found, expected)
    )
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    cosines = (ours * theirs).sum(axis=1) / np.maximum(lengths, 1e-30)
    return TokenScores(nll=1 - cosines, greedy_ids=ours.argmax(axis=1))
