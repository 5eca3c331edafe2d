"""The user's own files, and what is said about one that can't be used."""

from pathlib import Path

import pytest

from quill.model.data.corpora import load_pairs, load_pairs_file, load_text, load_text_files
from quill.model.data.splits import Pair
from quill.model.errors import CorpusError

STORY = "Once upon a time there was a quill. " * 50


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_each_file_is_a_document_and_directories_are_searched(tmp_path: Path) -> None:
    for number in range(12):
        write(tmp_path / "books" / f"{number:02}.txt", f"Book {number}")
    write(tmp_path / "books" / "cover.png", b"\xff\xd8")
    extra = write(tmp_path / "extra.md", "An extra.")
    corpus = load_text_files([tmp_path / "books", extra])
    assert corpus.held_out == ["Book 5"]
    assert corpus.train == [*(f"Book {n}" for n in range(12) if n != 5), "An extra."]


def test_one_file_gives_its_end_to_evaluation(tmp_path: Path) -> None:
    corpus = load_text_files([write(tmp_path / "a.txt", STORY)])
    assert "".join(corpus.train + corpus.held_out) == STORY


def test_byte_order_mark_and_carriage_returns_go(tmp_path: Path) -> None:
    corpus = load_text_files([write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo")])
    assert "".join(corpus.train + corpus.held_out) == "one\ntwo"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a.txt is blank"),
        (b" \n\t\n", "a.txt is blank"),
        (b"caf\xe9 au lait", "a.txt is not UTF-8: byte 3 is 0xe9.*iconv"),
        (b"x", "holds 1 characters: too little"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        load_text_files([write(tmp_path / "a.txt", content)])


def test_a_missing_file_and_an_empty_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"none\.txt can't be read: No such file"):
        load_text_files([tmp_path / "none.txt"])
    with pytest.raises(CorpusError, match=r"has no \*\.txt files"):
        load_text_files([tmp_path])


def test_a_tsv_gives_its_pairs(tmp_path: Path) -> None:
    rows = "one\teins\r\n two \tzwei\n\nthree\u2028!\tdrei\n"
    corpus = load_pairs_file(write(tmp_path / "a.tsv", rows))
    pairs = {*corpus.train, *corpus.held_out, *corpus.test}
    assert pairs == {Pair("one", "eins"), Pair("two", "zwei"), Pair("three\u2028!", "drei")}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("three", "line 3: 1 column instead of 2"),
        ("three\tdrei\ttrois", "line 3: 3 columns instead of 2"),
        ("three\t ", "line 3: the target is empty"),
        ("\tdrei", "line 3: the source is empty"),
    ],
)
def test_a_malformed_line_is_named_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        load_pairs_file(write(tmp_path / "a.tsv", f"one\teins\n\n{line}\nfour\tvier\n"))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(CorpusError, match=r"named 'soto'\. There are: sotu"):
        load_text("soto")
    with pytest.raises(CorpusError, match="There are: en-de, en-es, en-fr, kjv-web"):
        load_pairs("de-en")
