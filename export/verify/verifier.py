"""Compares each precision's graphs with PyTorch: differences, perplexity, batch invariance.

Knows: what must hold for each precision before a bundle may exist.
Does not know: how graphs are made or written.

PyTorch's results with the source's weights are computed once; perplexity, KL divergence and the
most likely tokens are compared with them. Every number that a quantized graph computes is compared
with PyTorch that has the graph's weights and rounds as its operators do.

An encoder's perplexity is that of masked tokens, always the same ones. An encoder without a head
for masked tokens has no such number: the mean cosine distance of its hidden states to PyTorch's is
taken in its place, and e to that power stands for the perplexity, so that the same limits ask for a
cosine of 0.99 (what a server chooses by itself) or 0.995 (quill8).
"""

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from quill.export.bundle.manifest import Graphs, Invariance, Sizes, Verification
from quill.export.errors import VerificationError
from quill.export.precisions import (
    MAX_RISE_FROM_SOURCE,
    PRECISIONS,
    UNROUNDED,
    Precision,
    Tolerance,
)
from quill.export.quantize.quantization import Quantization
from quill.export.verify.batch_invariance import (
    MAX_PROMPT,
    NUM_SLOTS,
    measure_encoder_invariance,
    measure_invariance,
)
from quill.export.verify.compare import (
    NUM_PROBES,
    Comparison,
    check_comparisons,
    compare,
    far_probes,
    probes,
)
from quill.export.verify.held_out import NUM_MASKS, HeldOut, Passage, mask_passages
from quill.export.verify.pytorch_reference import Array, PyTorchReference, ReferenceOutput
from quill.export.verify.runner import EncoderOutput, EncoderRunner, Runner
from quill.export.verify.token_scores import (
    TokenScores,
    concatenate,
    kl_divergence,
    score_tokens,
)
from quill.model.checkpoint.checkpoint import Checkpoint

Tick = Callable[[], None]  # one more item is done

NUM_TIMED_STEPS = 12
NUM_SCORED = 128  # positions whose logits are in memory
NUM_AT_ONCE = 16  # of them that are scored together: each takes as much memory again
NUM_GREEDY, MAX_GREEDY_PROMPT, MAX_GREEDY = 4, 32, 64  # texts, tokens of a prompt, new tokens
NUM_PACKED = 4  # texts in one run of an encoder
NUM_TEXT_PROBES = 8  # texts of which an encoder's every number is compared


@dataclass(frozen=True)
class Candidate:
    """Graphs that were written and aren't verified yet."""

    directory: Path
    graphs: Graphs
    runnable: Graphs  # the graphs as this machine can run them
    quantization: Quantization | None

    @property
    def precision(self) -> Precision:
        return self.graphs.precision


@dataclass(frozen=True)
class Scored:
    """The tokens of passages, scored by the graphs and by PyTorch with the source's weights."""

    found: TokenScores
    expected: TokenScores
    kl_divergence: Array | None = None  # of each position


@dataclass(frozen=True)
class Measured:
    """What one precision's graphs computed, beside PyTorch."""

    worst_difference: float
    scored: Scored
    step_ms: float
    invariance: Invariance | None
    greedy_length: float | None = None


class Verifier(ABC):
    """PyTorch's results, and the comparison of each precision with them."""

    def __init__(self, checkpoint: Checkpoint, sizes: Sizes, text: HeldOut) -> None:
        self._checkpoint = checkpoint
        self._sizes = sizes
        self._held_out = text

    @abstractmethod
    def num_ticks(self, precision: Precision) -> int:
        """Ticks that the verification of a precision takes."""

    @abstractmethod
    def _measure(self, candidate: Candidate, tick: Tick) -> Measured: ...

    def verify(self, candidate: Candidate, tick: Tick) -> Graphs:
        """The graphs with what was measured. Raises an error if they are beyond the tolerance."""
        measured = self._measure(candidate, tick)
        found, expected = measured.scored.found, measured.scored.expected
        divergence = measured.scored.kl_divergence
        verification = Verification(
            worst_difference=measured.worst_difference,
            greedy_agreement=float(np.mean(found.greedy_ids == expected.greedy_ids)),
            perplexity=found.perplexity,
            reference_perplexity=expected.perplexity,
            text=self._held_out.name,
            num_tokens=len(found.nll),
            step_ms=measured.step_ms,
            kl_divergence=None if divergence is None else float(divergence.mean()),
            greedy_length=measured.greedy_length,
        )
        return replace(candidate.graphs, verification=verification, invariance=measured.invariance)


class DecoderVerifier(Verifier):
    """Of causal and seq2seq models: every situation that a server brings about."""

    def __init__(self, checkpoint: Checkpoint, sizes: Sizes, text: HeldOut, tick: Tick) -> None:
        super().__init__(checkpoint, sizes, text)
        self._source = PyTorchReference(checkpoint)
        self._probes = probes(self._source, text, checkpoint.config.context)
        self._probes += far_probes(checkpoint.config, text)
        num_probes, passages = len(self._probes), [*self._probes, *text.passages]
        outputs = self._source.outputs(passages, num_cached=num_probes, tick=tick)
        self._outputs, self._scored = outputs[:num_probes], outputs[num_probes:]

    def num_ticks(self, precision: Precision) -> int:
        is_quantized = PRECISIONS[precision].is_quantized
        num_reference = self._source.num_ticks(len(self._probes)) if is_quantized else 0
        return num_reference + 2 + len(self._passages(precision))

    def _measure(self, candidate: Candidate, tick: Tick) -> Measured:
        precision, reference, outputs = candidate.precision, self._source, self._outputs
        if candidate.quantization is not None:
            reference = PyTorchReference(self._checkpoint, candidate.quantization)
            outputs = reference.outputs(self._probes, num_cached=len(self._probes), tick=tick)
        runner = Runner(
            candidate.directory, candidate.runnable, self._sizes, NUM_SLOTS, self._capacity()
        )
        comparisons = compare(runner, reference, outputs, self._checkpoint.config.window)
        worst = check_comparisons(comparisons, precision, self._tolerance(precision))
        del reference
        tick()
        passages = self._passages(precision)
        scored = score(runner, self._source, self._scored[: len(passages)], tick)
        check_rise(candidate, scored.found, scored.expected)
        invariance, greedy_length = None, None
        if candidate.graphs.device == "cpu":
            invariance = measure_invariance(runner, passages)
            greedy_length = self._greedy_length(runner, passages)
        tick()
        milliseconds = _decode_ms(runner, passages[0])
        return Measured(worst, scored, milliseconds, invariance, greedy_length)

    def _tolerance(self, precision: Precision) -> Tolerance:
        """Experts' inputs aren't rounded by the reference, so more must be allowed."""
        info = PRECISIONS[precision]
        has_experts = self._checkpoint.config.experts is not None
        return UNROUNDED if has_experts and info.is_quantized else info.tolerance

    def _greedy_length(self, runner: Runner, passages: Sequence[Passage]) -> float:
        """How many tokens greedy decoding continues as PyTorch would, on average. One pass of
        PyTorch tells: up to the first difference both have the same text."""
        some = passages[: min(NUM_GREEDY, -(-len(passages) // 2))]
        prompts = [
            Passage(each.ids[: min(MAX_GREEDY_PROMPT, -(-len(each.ids) // 2))], each.source)
            for each in some
        ]
        num_tokens = min(
            MAX_GREEDY,
            self._capacity() - max(len(prompt.ids) for prompt in prompts),
            self._checkpoint.config.context - max(len(prompt.ids) for prompt in prompts),
        )
        texts = [_continued(runner, prompt, num_tokens) for prompt in prompts]
        lengths = []
        for prompt, output in zip(prompts, self._source.outputs(texts), strict=True):
            first = len(prompt.ids)
            logits_TV = self._source.project(output.hidden_TD[first - 1 : -1])
            same = logits_TV.argmax(axis=1) == np.array(output.passage.ids[first:])
            lengths.append(int(np.logical_and.accumulate(same).sum()))
        return float(np.mean(lengths))

    def _passages(self, precision: Precision) -> list[Passage]:
        return enough(self._held_out.passages, PRECISIONS[precision].max_tokens)

    def _capacity(self) -> int:
        """Enough for every passage and for the longest prompt that is cut into chunks."""
        passages = [*self._held_out.passages, *self._probes]
        longest = max(max(len(passage.ids), len(passage.source)) for passage in passages)
        return max(longest, min(MAX_PROMPT, self._checkpoint.config.context))


def _continued(runner: Runner, prompt: Passage, num_tokens: int) -> Passage:
    """A prompt with the graph's most likely continuation."""
    _begin(runner, prompt)
    ids, logits_1V = list(prompt.ids), runner.prefill(0, prompt.ids)
    for _ in range(num_tokens):
        ids.append(int(logits_1V[-1].argmax()))
        logits_1V = runner.decode(ids[-1:])
    return Passage(tuple(ids), prompt.source)


class EncoderVerifier(Verifier):
    """Of encoders: hidden states and masked tokens, of single texts and of packed texts."""

    def __init__(self, checkpoint: Checkpoint, sizes: Sizes, text: HeldOut, tick: Tick) -> None:
        super().__init__(checkpoint, sizes, text)
        self._texts = mask_passages(checkpoint, text)
        reference = PyTorchReference(checkpoint)
        self._outputs = []
        for masked in self._texts:
            self._outputs.append(reference.encode(masked))
            tick()

    def num_ticks(self, precision: Precision) -> int:
        return 3

    def _measure(self, candidate: Candidate, tick: Tick) -> Measured:
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


def make_verifier(checkpoint: Checkpoint, sizes: Sizes, text: HeldOut, tick: Tick) -> Verifier:
    """Runs PyTorch; `num_reference_ticks` ticks."""
    kind = EncoderVerifier if checkpoint.config.family == "encoder" else DecoderVerifier
    return kind(checkpoint, sizes, text, tick)


def num_reference_ticks(checkpoint: Checkpoint, text: HeldOut) -> int:
    if checkpoint.config.family == "encoder":
        return len(text.passages) * (1 if checkpoint.special_tokens.mask is None else NUM_MASKS)
    if checkpoint.config.family == "causal" and checkpoint.config.recurrence is None:
        return checkpoint.config.num_layers
    return NUM_PROBES + len(text.passages)


def enough(passages: list[Passage], num_tokens: int | None) -> list[Passage]:
    """The first passages that have so many tokens together; all of them if None."""
    if num_tokens is None:
        return passages
    totals = itertools.accumulate(len(passage.ids) for passage in passages)
    return passages[: 1 + sum(total < num_tokens for total in totals)]


def score(
    runner: Runner,
    reference: PyTorchReference,
    outputs: Sequence[ReferenceOutput],
    tick: Tick = lambda: None,
) -> Scored:
    """All passages' tokens, in their order; a few at a time, so that few logits are in memory."""
    found, expected, divergences = [], [], []
    for output in outputs:
        ids = output.passage.ids
        _begin(runner, output.passage)
        for start in range(0, len(ids) - 1, NUM_SCORED):
            some = ids[start : min(start + NUM_SCORED, len(ids) - 1)]
            targets = ids[start + 1 : start + 1 + len(some)]
            ours = runner.prefill(0, some, range(len(some)))
            theirs = reference.project(output.hidden_TD[start : start + len(some)])
            for at in range(0, len(some), NUM_AT_ONCE):
                part = slice(at, at + NUM_AT_ONCE)
                found.append(score_tokens(ours[part], targets[part]))
                expected.append(score_tokens(theirs[part], targets[part]))
                divergences.append(kl_divergence(ours[part], theirs[part]))
        tick()
    return Scored(concatenate(found), concatenate(expected), np.concatenate(divergences))


def _begin(runner: Runner, passage: Passage) -> None:
    runner.rewind(0)
    if passage.source:
        runner.encode({0: passage.source})


def _decode_ms(runner: Runner, passage: Passage) -> float:
    """The median time of one decode step of one sequence."""
    _begin(runner, passage)
    tokens = iter(passage.ids)
    num_steps = min(NUM_TIMED_STEPS, len(passage.ids))
    return median_ms([lambda: runner.decode([next(tokens)])] * num_steps)


def median_ms(steps: Sequence[Callable[[], object]]) -> float:
    """The median time of some calls, in milliseconds."""
    times = []
    for step in steps:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1000


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


def check_rise(candidate: Candidate, found: TokenScores, expected: TokenScores) -> None:
    """Raises an error if perplexity rises more than the precision allows."""
    allowed = PRECISIONS[candidate.precision].max_rise
    if candidate.quantization is not None and candidate.quantization.is_source:
        allowed = MAX_RISE_FROM_SOURCE
    rise = found.perplexity / expected.perplexity - 1
    if allowed is not None and not rise <= allowed:
        raise VerificationError(
            f"the {candidate.precision} graph's perplexity is {found.perplexity:.4f}, {rise:.2%} "
            f"above PyTorch's {expected.perplexity:.4f}; {allowed:.2%} is allowed"
        )


def check_default(graphs: Graphs) -> None:
    """Raises an error for graphs that no server chooses by itself."""
    if problem := graphs.quality_problem:
        raise VerificationError(problem)
