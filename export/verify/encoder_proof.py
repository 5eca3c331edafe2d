"""The proof of an encoder: hidden states, hidden tokens and invariance of each precision.

Knows: what must hold before a bundle may exist. Does not know: how graphs are made or written.

As for the others, "perplexity" is what tells a good precision: here of tokens that are hidden from
the model, always the same ones. A model without a head for them has no such number. Of its hidden
states the mean cosine distance to PyTorch's is taken, and e to that power stands for it, so that
the same limits ask for a cosine of 0.98 (what a server takes by itself) or 0.995 (quill8).
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from quill.export.bundle.manifest import Graphs, Invariance, Sizes, Verification
from quill.export.precisions import PRECISIONS, Precision
from quill.export.quantize.quantization import Quantization, dequantized
from quill.export.verify.batch_invariance import NUM_SLOTS, ROWS
from quill.export.verify.compare import Comparison, check_comparisons
from quill.export.verify.encoder_runner import EncoderRunner, Read
from quill.export.verify.held_out import HeldOut
from quill.export.verify.perplexity import NUM_TIMED_STEPS
from quill.export.verify.proof import Tick, check_rise
from quill.export.verify.pytorch_reference import Surprise, foretold
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.data.batches import IGNORED, mix
from quill.model.data.masking import Marks, hide
from quill.model.network.transformer import Transformer

# T tokens · D model size · L hidden tokens · V vocabulary

NUM_MASKS = 2  # each passage is asked about so many times, with other tokens hidden
NUM_PACKED = 4  # texts in one run
NUM_PROBES = 8  # texts whose every number is compared
NUM_COMPANIES = 6  # that a text is read in
SEED = 20181011  # the day "BERT" appeared


@dataclass(frozen=True)
class Question:
    """A text with hidden tokens, and what they are."""

    ids: tuple[int, ...]
    places: tuple[int, ...]
    targets: tuple[int, ...]


def questions(checkpoint: Checkpoint, text: HeldOut) -> list[Question]:
    """The same tokens are hidden every time. Without a token for it, none are."""
    special, asked = checkpoint.special_tokens, []
    for number, passage in enumerate(text.passages):
        if special.mask is None:
            asked.append(Question(passage.ids, (), ()))
            continue
        marks = Marks(
            special.mask if special.bos is None else special.bos,
            special.mask if special.eos is None else special.eos,
            special.mask,
            checkpoint.config.vocab_size,
        )
        for turn in range(NUM_MASKS):
            generator = torch.Generator().manual_seed(mix(SEED, number, turn))
            batch = hide(torch.tensor([passage.ids]), marks, generator)
            targets = batch.targets_BT[0].tolist()
            places = [place for place, target in enumerate(targets) if target != IGNORED]
            ids = tuple(batch.inputs_BT[0].tolist())
            asked.append(Question(ids, tuple(places), tuple(targets[each] for each in places)))
    return asked


class EncoderProof:
    """PyTorch's side, computed once; each precision is then held against it."""

    def __init__(self, checkpoint: Checkpoint, text: HeldOut, tick: Tick) -> None:
        self._checkpoint = checkpoint
        self._held_out = text
        self._questions = questions(checkpoint, text)
        self._answers = _ask(checkpoint, self._questions, tick)

    @staticmethod
    def num_questions(text: HeldOut) -> int:
        """Ticks that asking PyTorch takes; at the most, if nothing can be hidden."""
        return NUM_MASKS * len(text.passages)

    def num_checks(self, precision: Precision) -> int:
        """Ticks that the proof of a precision takes."""
        return 3

    def prove(
        self,
        directory: Path,
        sizes: Sizes,
        graphs: Graphs,
        runnable: Graphs,
        quantization: Quantization | None,
        tick: Tick,
    ) -> Graphs:
        """The same graphs with what was measured. Refuses those that aren't good enough."""
        assert PRECISIONS[graphs.precision].device == "cpu"
        runner = EncoderRunner(directory, runnable, sizes)
        probes = self._questions[:NUM_PROBES]
        answers = self._answers[:NUM_PROBES]
        if quantization is not None and not quantization.is_source:
            answers = _ask(dequantized(self._checkpoint, quantization), probes)
        worst = check_comparisons(_compare(runner, probes, answers), graphs.precision)
        tick()
        found = self._surprise(_read_packed(runner, self._questions))
        expected = self._surprise(self._answers)
        check_rise(graphs.precision, found, expected, quantization)
        verification = Verification(
            worst_difference=worst,
            greedy_agreement=float(np.mean(found.favourites == expected.favourites)),
            perplexity=found.perplexity,
            reference_perplexity=expected.perplexity,
            text=self._held_out.name,
            num_tokens=len(found.nll),
            step_ms=_read_ms(runner, self._questions[0]),
        )
        tick()
        invariance = measure_invariance(runner, self._questions)
        tick()
        return replace(graphs, verification=verification, invariance=invariance)

    def _surprise(self, read: Sequence[Read]) -> Surprise:
        if self._checkpoint.special_tokens.mask is None:
            return _distances(read, self._answers)
        targets = [target for question in self._questions for target in question.targets]
        return foretold(np.concatenate([each.logits_LV for each in read]), targets)


def _distances(read: Sequence[Read], answers: Sequence[Read]) -> Surprise:
    """The cosine distance of each token's hidden state, and its greatest number."""
    found, expected = (
        np.concatenate([each.hidden_TD for each in part]).astype(np.float64)
        for part in (read, answers)
    )
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    cosines = (found * expected).sum(axis=1) / np.maximum(lengths, 1e-30)
    return Surprise(nll=1 - cosines, favourites=found.argmax(axis=1))


@torch.no_grad()
def _ask(
    checkpoint: Checkpoint, asked: Sequence[Question], tick: Tick = lambda: None
) -> list[Read]:
    model, answers = checkpoint.build(), []
    assert isinstance(model, Transformer)
    for question in asked:
        hidden_TD = model.states(torch.tensor([question.ids]))[0]
        logits_LV = model.project(hidden_TD[list(question.places)])
        answers.append(Read(hidden_TD.numpy(), logits_LV.numpy()))
        tick()
    return answers


def _compare(
    runner: EncoderRunner, asked: Sequence[Question], answers: Sequence[Read]
) -> Iterator[Comparison]:
    """Texts alone, and texts of different lengths in one run."""
    alone = [runner.read([each.ids], [each.places])[0] for each in asked]
    for name, read in (("alone", alone), ("packed", _read_packed(runner, asked))):
        for found, expected in zip(read, answers, strict=True):
            yield Comparison(f"hidden states, {name}", found.hidden_TD, expected.hidden_TD)
            if len(expected.logits_LV):
                yield Comparison(f"hidden tokens, {name}", found.logits_LV, expected.logits_LV)


def _read_packed(runner: EncoderRunner, asked: Sequence[Question]) -> list[Read]:
    read: list[Read] = []
    for start in range(0, len(asked), NUM_PACKED):
        some = asked[start : start + NUM_PACKED]
        read += runner.read([each.ids for each in some], [each.places for each in some])
    return read


def _read_ms(runner: EncoderRunner, question: Question) -> float:
    """The median time of reading one text, in milliseconds."""
    times = []
    for _ in range(NUM_TIMED_STEPS):
        start = time.perf_counter()
        runner.read([question.ids])
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1000


def measure_invariance(runner: EncoderRunner, asked: Sequence[Question]) -> Invariance:
    """Is a text read among any others what it is alone, to the last bit?"""
    texts = _different_lengths(asked)
    places = [range(len(ids)) for ids in texts]
    alone = [runner.read([ids], [range(len(ids))])[0] for ids in texts]
    chance = random.Random(0)
    groups = [chance.sample(range(NUM_SLOTS), num) for num in ROWS for _ in range(NUM_COMPANIES)]
    holds = all(
        np.array_equal(found.hidden_TD, alone[slot].hidden_TD)
        and np.array_equal(found.logits_LV, alone[slot].logits_LV)
        for slots in groups
        for slot, found in zip(
            slots,
            runner.read([texts[slot] for slot in slots], [places[slot] for slot in slots]),
            strict=True,
        )
    )
    return Invariance(holds=holds, rows=ROWS, num_cut_tokens=0)


def _different_lengths(asked: Sequence[Question]) -> list[tuple[int, ...]]:
    """One for each slot, from a single token to the longest there is."""
    longest = max(len(question.ids) for question in asked)
    lengths = np.linspace(1, longest, NUM_SLOTS).astype(int).tolist()
    return [asked[slot % len(asked)].ids[:length] for slot, length in enumerate(lengths)]
