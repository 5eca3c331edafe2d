"""The table of JSON Schema keywords in server/docs/structured-output.md, tried."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quill.loadtest.bench.forms.validity import Validity
from quill.loadtest.workload.forms import CHOICES, GRAMMARS, REFUSED, REGEXES, SCHEMAS
from quill.server.errors import InvalidFieldError
from quill.server.grammar.compiler import Form
from tests.server.grammar.test_schemas import answer
from tests.server.running import make_grammars

PAGE = Path(__file__).parents[3] / "server" / "docs" / "structured-output.md"
NUM_ANSWERS = 12
# They tell people something, and no answer.
ANNOTATIONS = {"$schema", "$comment", "title", "description", "default", "examples"}
ANNOTATIONS |= {"deprecated", "readOnly"}


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_to_each_of_the_fifty_is_valid(name: str) -> None:
    validity, num_whole = Validity(SCHEMAS[name]), 0
    for seed in range(NUM_ANSWERS):
        said = answer(SCHEMAS[name], random.Random(f"{name}/{seed}"))
        if said is not None:
            num_whole += 1
            assert validity.problem(said.decode()) == ""
    assert num_whole >= NUM_ANSWERS // 2


def test_there_are_fifty() -> None:
    assert len(SCHEMAS) == 50


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_to_is_refused(name: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        make_grammars().compile_now(Form("json_schema", json.dumps(REFUSED[name])))
    if name.isidentifier() or name[0] == "$":  # a keyword
        assert name.removeprefix("min").removeprefix("max") in str(caught.value)


def test_the_crowds_other_forms_can_be_kept_to() -> None:
    for regex in REGEXES.values():
        make_grammars().compile_now(Form("regex", regex))
    for some in CHOICES:
        make_grammars().compile_now(Form("choice", json.dumps(some)))
    for grammar in GRAMMARS.values():
        make_grammars().compile_now(Form("lark", grammar))


def told(row: str) -> set[str]:
    (line,) = re.findall(rf"^\| {row} \| (.*) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    return set(re.findall(r"`([^`]+)`", line))


def keywords(schema: Any) -> Iterator[str]:
    """Of a schema and all within it, not of what it lists as values."""
    if not isinstance(schema, dict):
        return
    yield from schema
    for name, inner in schema.items():
        if name in ("properties", "patternProperties", "$defs", "definitions"):
            for each in inner.values():
                yield from keywords(each)
        elif name not in ("const", "enum", "default", "examples"):
            for each in inner if isinstance(inner, list) else [inner]:
                yield from keywords(each)


def test_the_page_names_all_that_was_tried_and_nothing_else() -> None:
    kept = {name for schema in SCHEMAS.values() for name in keywords(schema)} - ANNOTATIONS
    formats = {s["format"] for s in SCHEMAS.values() if "format" in s}
    assert told("supported") | told("in part") == kept | formats
    refused = {name for name in REFUSED if name.isidentifier() or name[0] == "$"}
    assert told("rejected by name") == refused - {"minProperties", "maxProperties"}
