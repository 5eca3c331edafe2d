"""What is held out stays out of training."""

import pytest

from quill.model.data.splits import (
    Pair,
    merge_sources,
    num_held_out,
    split_documents,
    split_pairs,
    wording,
)
from quill.model.errors import CorpusError


def numbered(count: int) -> list[Pair]:
    return [Pair(f"word {number}", f"Wort {number}") for number in range(count)]


def test_every_twentieth_document_is_held_out_whole() -> None:
    documents = [f"document {number}" for number in range(45)]
    corpus = split_documents("x", documents)
    assert corpus.held_out == ["document 5", "document 25"]
    assert corpus.train == [text for text in documents if text not in corpus.held_out]


def test_ten_documents_are_enough_to_hold_one_out_and_a_copy_counts_once() -> None:
    corpus = split_documents("x", [f"document {n}" for n in range(10)] * 2)
    assert corpus.held_out == ["document 5"]
    assert len(corpus.train) == 9


def test_few_documents_each_give_their_end_from_a_paragraph_on() -> None:
    text = "\n\n".join(f"Paragraph {number}." for number in range(200))
    corpus = split_documents("x", [text, text.upper()])
    for head, tail, whole in zip(corpus.train, corpus.held_out, [text, text.upper()], strict=True):
        assert head + tail == whole
        assert tail.lower().startswith("paragraph 1")
        assert 0.04 < len(tail) / len(whole) < 0.07


def test_a_text_without_spaces_is_cut_all_the_same() -> None:
    corpus = split_documents("x", ["字" * 100])
    assert (corpus.train, corpus.held_out) == (["字" * 95], ["字" * 5])


def test_no_source_is_in_two_parts_and_none_is_lost() -> None:
    pairs = numbered(1000)
    corpus = split_pairs("x", pairs * 2)
    assert sorted(corpus.train + corpus.held_out + corpus.test) == sorted(pairs)
    assert len(corpus.held_out) == len(corpus.test) == 100


def test_pairs_are_parted_the_same_way_in_any_order() -> None:
    one, other = (split_pairs("x", pairs) for pairs in (numbered(50), numbered(50)[::-1]))
    assert (one.held_out, one.test) == (other.held_out, other.test)


def test_near_copies_stay_on_one_side() -> None:
    pairs = [Pair(f"{name} {n}{end}", "…") for name in "abcdefgh" for n in (1, 2) for end in ".!"]
    corpus = split_pairs("x", pairs, family=wording)
    parts = [
        {pair.source[0] for pair in part} for part in (corpus.train, corpus.held_out, corpus.test)
    ]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 8


def test_texts_without_a_letter_are_families_of_their_own() -> None:
    assert wording("1 2 3") != wording("3 2 1")


def test_a_source_with_several_targets_keeps_the_most_frequent() -> None:
    pairs = [Pair("Level", "Stufe"), Pair("Level", "Pegel"), Pair("Level", "Pegel")]
    assert merge_sources(pairs) == [Pair("Level", "Pegel")]


@pytest.mark.parametrize(
    ("num_pairs", "expected"), [(3, 1), (1_000, 100), (10_000, 500), (40_000, 1_000)]
)
def test_held_out_size_grows_with_the_data(num_pairs: int, expected: int) -> None:
    assert num_held_out(num_pairs) == expected


def test_three_pairs_are_the_least() -> None:
    corpus = split_pairs("x", numbered(3))
    assert (len(corpus.train), len(corpus.held_out), len(corpus.test)) == (1, 1, 1)
    with pytest.raises(CorpusError, match="x has 2 different source texts; at least 3"):
        split_pairs("x", numbered(2))
