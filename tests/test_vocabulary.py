"""User-facing surfaces use the field's words: somebody who knows vLLM finds what they search for.

Surfaces: the protos, metrics, commands with their help, pages, and the texts of errors.
History (CHANGELOG.md, loadtest/RESULTS.md) keeps its words.
"""

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from quill.__main__ import build_parser
from quill.server.telemetry.metrics import Metrics

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("model", "export", "server", "loadtest")

# What stood here before: the field's word.
BANNED = {
    r"guess\w*": "draft token, speculative decoding",
    r"set[- ]backs?": "preempt, preemption",
    r"beginnings?|begins? alike": "prefix, shared prefix",
    r"keeps? to (a|the) forms?|forced tokens?": "constraint, grammar; jump-forward tokens",
    r"doors?": "frontend, protocol",
    r"crowds?|in any company": "batch, batched; load",
    r"rooms?|inspector": "package; tests",
    r"sieges?|besieg\w*|hostile": "adversarial load",
    r"keeper|detour|fleets?": "coordinator, fallback proxy, endpoint pool",
    r"oracle|contenders?": "reference, backend",
    r"rows?": "sequence",
    r"slots?": "block, sequence",
    r"made tokens|tokens (were|are) made": "generated tokens",
    r"surpris\w+": "negative log-likelihood",
    r"drawn?|draws": "sample",
    r"wishes|on duty": "options; serving",
    r"(normal|quant|optim|token|recogn|initial|serial)is(e[drs]?|ers|ing|ation)": "ize",
}  # fmt: skip
# Where a banned word is the right one: a table's rows, other projects' names.
ALLOWED = re.compile(
    r"rows? of (a |the )?(table|matri|weight|embedding|logit)\w*|Ray Data|slots? of llama"
)


def violations(text: str) -> list[str]:
    text = ALLOWED.sub("", text)
    found = re.findall(rf"(?<![\w./-])({'|'.join(BANNED)})(?![\w/-])", text, re.IGNORECASE)
    return sorted({match[0].lower() for match in found})


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in set(action.choices.values()):
                yield from commands(inner)


def test_protos() -> None:
    for path in (ROOT / "protos").glob("*.proto"):
        assert (path.name, violations(path.read_text(encoding="utf-8"))) == (path.name, [])


def test_metrics() -> None:
    texts = [f"{each.name} {each.documentation}" for each in Metrics().registry.collect()]
    assert violations(" ".join(texts).replace("_", " ")) == []


def test_commands() -> None:
    found = {each.prog: violations(each.format_help()) for each in commands(build_parser())}
    assert {prog: words for prog, words in found.items() if words} == {}


PAGES = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"]
PAGES += [f"{name}/README.md" for name in PACKAGES]
PAGES += sorted(str(each.relative_to(ROOT)) for each in ROOT.glob("*/docs/*.md"))


@pytest.mark.parametrize("page", PAGES)
def test_pages(page: str) -> None:
    assert violations((ROOT / page).read_text(encoding="utf-8")) == []


# Texts have spaces; names of elements, classes and events don't.
LITERAL = re.compile(r'"([^"\n]* [^"\n]*)"|`([^`]* [^`]*)`')


def test_web_page() -> None:
    found = {}
    for path in (ROOT / "server/http/page").glob("*.js"):
        literals = LITERAL.findall(path.read_text(encoding="utf-8"))
        found[path.name] = violations(" ".join(part for pair in literals for part in pair))
    html = (ROOT / "server/http/page/index.html").read_text(encoding="utf-8")
    found["index.html"] = violations(re.sub(r"<[^>]*>", " ", html))
    html_words = {"row", "rows"}  # of tables and text areas
    assert {name: words for name, words in found.items() if {*words} - html_words} == {}


def raised_texts(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and node.exc is not None:
            for inner in ast.walk(node.exc):
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    yield inner.value


def test_errors() -> None:
    paths = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    found = {
        str(path.relative_to(ROOT)): words
        for path in paths
        if (words := violations(" ".join(raised_texts(path))))
    }
    assert found == {}


@pytest.mark.parametrize("word", ["guessed tokens", "set back", "begin alike", "quantise", "a row"])
def test_banned_words_are_found(word: str) -> None:
    assert violations(f"Here is {word}.")
