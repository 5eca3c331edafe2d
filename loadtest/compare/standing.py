"""What is known of one translator, and how its numbers are made.

Knows: BLEU, lengths, alignments as numbers. Does not know: how they came about, pictures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import sacrebleu

NUM_GROUPS = 5
Weights = npt.NDArray[np.float64]


class Sentence(NamedTuple):
    """One of the test set."""

    num_source: int  # tokens
    reference: str
    translation: str  # as it was served


class LengthGroup(NamedTuple):
    """Sentences of similar length."""

    shortest: int
    longest: int
    mean: float
    bleu: float


class Alignment(NamedTuple):
    rows: list[str]
    columns: list[str]
    weights_TS: Weights
    what: str


@dataclass(frozen=True, kw_only=True)
class Standing:
    title: str
    context: str  # fixed, bahdanau or attention
    num_parameters: int
    precision: str
    minutes: float
    num_steps: int
    train_speed: float  # tokens a second
    losses: list[tuple[float, float]]  # held out, by minute
    bleu: float
    by_length: list[LengthGroup]
    alone_speed: float  # tokens a second, one sentence at a time
    crowd_speed: float
    num_equal: int  # of the sentences: served tokens are PyTorch's
    num_sentences: int
    alignment: Alignment | None

    @property
    def long_bleu(self) -> float:
        return self.by_length[-1].bleu


def title_of(model: Mapping[str, Any]) -> tuple[str, str]:
    """In words, from a run's config; and what it knows of the source."""
    recurrence = model.get("recurrence")
    if recurrence is None:
        return "Transformer", "attention"
    words = {"fixed": "fixed vector", "bahdanau": "Bahdanau"}
    return f"{recurrence['cell'].upper()}, {words[recurrence['context']]}", recurrence["context"]


def bleu(sentences: Sequence[Sentence]) -> float:
    translations = [each.translation for each in sentences]
    return float(sacrebleu.corpus_bleu(translations, [[s.reference for s in sentences]]).score)


def by_length(sentences: Sequence[Sentence]) -> list[LengthGroup]:
    """As many groups of the same size, the shortest first."""
    ordered = sorted(sentences, key=lambda each: each.num_source)
    num_groups = min(NUM_GROUPS, len(ordered))
    groups = []
    for number in range(num_groups):
        first, last = (len(ordered) * each // num_groups for each in (number, number + 1))
        some = ordered[first:last]
        lengths = [each.num_source for each in some]
        mean = sum(lengths) / len(lengths)
        groups.append(LengthGroup(lengths[0], lengths[-1], mean, bleu(some)))
    return groups


def sharpest(found: Mapping[str, Any]) -> Alignment:
    """The mean of all heads, of the layer that is surest of where it looks."""
    means = [np.mean(np.array(layer, np.float64), axis=0) for layer in found["weights"]]
    layer = min(range(len(means)), key=lambda index: _entropy(means[index]))
    num_heads = len(found["weights"][layer])
    what = f"layer {layer} of {len(means)}, mean of {num_heads} heads" if num_heads > 1 else ""
    return Alignment(found["rows"], found["columns"], means[layer], what)


def _entropy(weights_TS: Weights) -> float:
    return float(-(weights_TS * np.log(np.maximum(weights_TS, 1e-12))).sum(axis=1).mean())


def verdicts(standings: Sequence[Standing]) -> list[str]:
    """What happened, whatever was hoped for."""
    told = [_time_spent(standings)]
    fixed = [each for each in standings if each.context == "fixed"]
    looking = [each for each in standings if each.context == "bahdanau"]
    newest = [each for each in standings if each.context == "attention"]
    if fixed and looking:
        told.append(_on_long(max(looking, key=_long), max(fixed, key=_long)))
    if newest and fixed + looking:
        told.append(_on_long(newest[0], max(fixed + looking, key=_long)))
        told.append(_on_all(newest[0], max(fixed + looking, key=lambda each: each.bleu)))
    if max(each.bleu for each in standings) < 5:
        told.append("All scores are so low that their differences say little: train longer.")
    num_equal = sum(each.num_equal for each in standings)
    num = sum(each.num_sentences for each in standings)
    told.append(
        f"Served translations were token for token PyTorch's own for {num_equal:,} of {num:,}; "
        "precisions below fp32 may differ where two tokens are nearly as likely."
    )
    return told


def _long(standing: Standing) -> float:
    return standing.long_bleu


def _time_spent(standings: Sequence[Standing]) -> str:
    minutes = [each.minutes for each in standings]
    return f"Training took from {min(minutes):.1f} to {max(minutes):.1f} minutes each."


def _on_long(ours: Standing, theirs: Standing) -> str:
    group = ours.by_length[-1]
    return (
        f"On the longest sources ({group.shortest} to {group.longest} tokens) {ours.title} has "
        f"BLEU {ours.long_bleu:.1f} and {theirs.title} {theirs.long_bleu:.1f}: "
        f"{_compared(ours.long_bleu, theirs.long_bleu)}."
    )


def _on_all(ours: Standing, theirs: Standing) -> str:
    return (
        f"On all sources {ours.title} has {ours.bleu:.1f} and the best of the others, "
        f"{theirs.title}, {theirs.bleu:.1f}: {_compared(ours.bleu, theirs.bleu)}."
    )


def _compared(ours: float, theirs: float) -> str:
    if abs(ours - theirs) < 0.5:
        return "no difference that could be told"
    return "the first is ahead" if ours > theirs else "the first is behind"
