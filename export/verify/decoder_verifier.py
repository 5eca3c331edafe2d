"""Compares a decoder's graphs with PyTorch: differences, perplexity, batch invariance, greedy text.

Knows: what is run of causal and seq2seq models, in which order. Does not know: limits
(export/verify/verifier.py), how graphs are made or written.

PyTorch's results with the source's weights are computed once; perplexity, KL divergence and the
most likely tokens are compared with them. Every number that a quantized graph computes is compared
with PyTorch that has the graph's weights and rounds as its operators do.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from quill.export.bundle.manifest import Sizes
from quill.export.precisions import PRECISIONS, UNROUNDED, Precision, Tolerance
from quill.export.quantize.quantization import Quantization
from quill.export.verify.batch_invariance import MAX_PROMPT, NUM_SLOTS, measure_invariance
from quill.export.verify.compare import check_comparisons, compare, far_probes, probes
from quill.export.verify.held_out import HeldOut, Passage
from quill.export.verify.pytorch_reference import Job, PyTorchReference, ReferenceOutput, run_jobs
from quill.export.verify.runner import Runner
from quill.export.verify.token_scores import concatenate, kl_divergence, score_tokens
from quill.export.verify.verifier import (
    NUM_TIMED_STEPS,
    Candidate,
    Measured,
    Scored,
    Tick,
    Verifier,
    check_rise,
    median_ms,
    trim_heap,
)
from quill.model.checkpoint.checkpoint import Checkpoint

NUM_SCORED = 128  # positions whose logits are in memory
NUM_AT_ONCE = 16  # of them that are scored together: each takes as much memory again
NUM_GREEDY, MAX_GREEDY_PROMPT, MAX_GREEDY = 4, 32, 64  # texts, tokens of a prompt, new tokens


class DecoderVerifier(Verifier):
    """Of causal and seq2seq models: every situation that a server brings about."""

    def __init__(self, checkpoint: Checkpoint, sizes: Sizes, text: HeldOut) -> None:
        super().__init__(checkpoint, sizes, text)
        self._source = PyTorchReference(checkpoint)
        self._probes = probes(self._source, text, checkpoint.config.context)
        self._probes += far_probes(checkpoint.config, text)
        self._scored: list[ReferenceOutput] = []  # of all passages; the first precision needs them

    def num_ticks(self, precision: Precision, quantization: Quantization | None) -> int:
        passages = self._passages(precision)
        num_plain = len(self._missing()) + len(self._prompts(passages))
        num_reference = self._source.num_ticks(num_plain + len(self._probes))
        if quantization is not None and not quantization.is_source:
            num_reference = sum(map(self._source.num_ticks, (num_plain, len(self._probes))))
        return num_reference + 2 + len(passages)

    def _measure(self, candidate: Candidate, tick: Tick) -> Measured:
        """The graphs' greedy texts first, so that each layer of PyTorch is read once for all. Only
        then the graphs again: their weights and PyTorch's aren't in memory together."""
        precision, quantization = candidate.precision, candidate.quantization
        passages = self._passages(precision)
        texts = self._greedy_texts(candidate, passages)
        reference = self._source if quantization is None else self._source.rounding_as(quantization)
        outputs, continued = self._run_pytorch(reference, texts, tick)
        runner = self._runner(candidate)
        comparisons = compare(runner, reference, outputs, self._checkpoint.config.window)
        worst = check_comparisons(comparisons, precision, self._tolerance(precision))
        del reference, outputs
        tick()
        scored = score(runner, self._source, self._scored[: len(passages)], tick)
        check_rise(candidate, scored.found, scored.expected)
        invariance, greedy_length = None, None
        if candidate.graphs.device == "cpu":
            invariance = measure_invariance(runner, passages)
            greedy_length = self._greedy_length(self._prompts(passages), continued)
        tick()
        milliseconds = _decode_ms(runner, passages[0])
        return Measured(worst, scored, milliseconds, invariance, greedy_length)

    def _missing(self) -> list[Passage]:
        return [] if self._scored else self._held_out.passages

    def _run_pytorch(
        self, reference: PyTorchReference, texts: Sequence[Passage], tick: Tick
    ) -> tuple[list[ReferenceOutput], list[ReferenceOutput]]:
        """The probes, and the texts with the source's weights; the passages if they are missing."""
        missing = self._missing()
        jobs = [
            Job(self._source, [*missing, *texts]),
            Job(reference, self._probes, num_cached=len(self._probes)),
        ]
        plain, of_probes = run_jobs(jobs, tick)
        self._scored = self._scored or plain[: len(missing)]
        trim_heap()
        return of_probes, plain[len(missing) :]

    def _runner(self, candidate: Candidate) -> Runner:
        return Runner(
            candidate.directory, candidate.runnable, self._sizes, NUM_SLOTS, self._capacity()
        )

    def _tolerance(self, precision: Precision) -> Tolerance:
        """Experts' inputs aren't rounded by the reference, so more must be allowed."""
        info = PRECISIONS[precision]
        has_experts = self._checkpoint.config.experts is not None
        return UNROUNDED if has_experts and info.is_quantized else info.tolerance

    def _prompts(self, passages: Sequence[Passage]) -> list[Passage]:
        """That are continued by greedy decoding."""
        return [
            Passage(each.ids[: min(MAX_GREEDY_PROMPT, -(-len(each.ids) // 2))], each.source)
            for each in passages[: min(NUM_GREEDY, -(-len(passages) // 2))]
        ]

    def _greedy_texts(self, candidate: Candidate, passages: Sequence[Passage]) -> list[Passage]:
        """Prompts with the graphs' most likely continuation."""
        if candidate.graphs.device != "cpu":
            return []
        prompts, runner = self._prompts(passages), self._runner(candidate)
        longest = max(len(prompt.ids) for prompt in prompts)
        context = min(self._capacity(), self._checkpoint.config.context)
        num_tokens = min(MAX_GREEDY, context - longest)
        return [_continued(runner, prompt, num_tokens) for prompt in prompts]

    def _greedy_length(
        self, prompts: Sequence[Passage], outputs: Sequence[ReferenceOutput]
    ) -> float:
        """How many tokens greedy decoding continues as PyTorch would, on average. One pass of
        PyTorch tells: up to the first difference both have the same text."""
        lengths = []
        for prompt, output in zip(prompts, outputs, strict=True):
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
