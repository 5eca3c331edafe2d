"""Whatever the schema: output that ends by itself is valid. The table of keywords in
server/docs/structured-output.md is tried: fifty schemas are followed, others are errors."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quill.loadtest.bench.backends.quill_structured import Validity
from quill.loadtest.workload.constraints import CHOICES, GRAMMARS, REFUSED, REGEXES
from quill.loadtest.workload.constraints import SCHEMAS as FIFTY
from quill.server.errors import InvalidFieldError
from tests.server.scripted_session import END, VOCAB_SIZE
from tests.server.small_grammars import byte_grammar

MAX_TOKENS = 600
NAMES = st.sampled_from(["a", "name", "é", 'q"', "long name"])
VALUES = [1, "x", None, 2.5, [1]]
SIMPLE: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(lambda some: {"enum": some}, st.lists(st.sampled_from(VALUES), min_size=1)),
    st.builds(lambda const: {"const": const}, st.sampled_from(["ü", 3, {"k": [True]}])),
    st.builds(
        lambda least, size: {"type": "integer", "minimum": least, "maximum": least + size},
        st.integers(-50, 5000),
        st.integers(0, 400),
    ),
    st.just({"type": "number", "exclusiveMinimum": -1, "maximum": 2.5}),
    st.just({"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 99}),
    st.builds(
        lambda least, size: {"type": "string", "minLength": least, "maxLength": least + size},
        st.integers(0, 3),
        st.integers(0, 5),
    ),
    st.sampled_from(
        [
            {"type": "string", "pattern": "^[A-Z]{2}[0-9]{1,3}$"},
            {"type": "string", "format": "date"},
            {"type": ["boolean", "null"]},
            {"$ref": "#/$defs/pair"},
        ]
    ),
)


def _tuple(first: list[Any]) -> dict[str, Any]:
    return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}


def _object(properties: dict[str, Any], required: list[str], more: Any) -> dict[str, Any]:
    names = [name for name in properties if name in required]
    fields = {"properties": properties, "required": names, "additionalProperties": more}
    return {"type": "object", **fields}


SCHEMAS = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(
        st.builds(
            _object,
            st.dictionaries(NAMES, inner, max_size=4),
            st.lists(NAMES),
            st.sampled_from([False, {"type": "null"}]),
        ),
        st.builds(
            lambda items, most: {"type": "array", "items": items, "maxItems": most},
            inner,
            st.integers(0, 3),
        ),
        st.builds(_tuple, st.lists(inner, min_size=1, max_size=2)),
        st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=8,
)
PAIR = _tuple([{"type": "integer"}, {"enum": ["l", "r"]}])


def output(schema: dict[str, Any], rng: random.Random) -> bytes | None:
    """Random tokens among those that are allowed; None: it was cut."""
    matcher = byte_grammar("json_schema", json.dumps(schema)).matcher()
    tokens: list[int] = []
    while len(tokens) < MAX_TOKENS:
        (mask,) = matcher.masks((), (), 0)
        assert not matcher.has_failed
        bits = np.unpackbits(mask.view(np.uint8), count=VOCAB_SIZE, bitorder="little")
        token = rng.choice(np.flatnonzero(bits).tolist())
        if token == END:
            return bytes(each - 1 for each in tokens)
        matcher.accept(token)
        tokens.append(token)
    return None


@settings(max_examples=150, deadline=None)
@given(SCHEMAS, st.randoms(use_true_random=False))
def test_output_that_ends_is_valid(schema: dict[str, Any], rng: random.Random) -> None:
    schema = {**schema, "$defs": {"pair": PAIR}}
    try:
        text = output(schema, rng)
    except InvalidFieldError:
        return  # such as an enum of nothing that is left
    if text is not None:
        validator = jsonschema.Draft202012Validator
        checker = validator.FORMAT_CHECKER
        jsonschema.validate(json.loads(text), schema, validator, format_checker=checker)


@pytest.mark.parametrize("text", ["\b", "\0", "\x1f", "\x7f"])
@pytest.mark.parametrize("as_name", [False, True])
def test_constants_and_names_may_have_control_characters(text: str, as_name: bool) -> None:
    value = {text: None} if as_name else text
    named = _object({text: {"type": "null"}}, [text], False)
    generated = output(named if as_name else {"const": text}, random.Random(0))
    assert generated is not None
    assert json.loads(generated) == value


PAGE = Path(__file__).parents[3] / "server" / "docs" / "structured-output.md"
NUM_ANSWERS = 12
# Annotations constrain nothing.
ANNOTATIONS = {"$schema", "$comment", "title", "description", "default", "examples"}
ANNOTATIONS |= {"deprecated", "readOnly"}


@pytest.mark.parametrize("name", FIFTY)
def test_output_of_each_of_the_fifty_is_valid(name: str) -> None:
    validity, num_whole = Validity(FIFTY[name]), 0
    for seed in range(NUM_ANSWERS):
        text = output(FIFTY[name], random.Random(f"{name}/{seed}"))
        if text is not None:
            num_whole += 1
            assert validity.problem(text.decode()) == ""
    assert num_whole >= NUM_ANSWERS // 2


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_errors(name: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        byte_grammar("json_schema", json.dumps(REFUSED[name]))
    if name.isidentifier() or name[0] == "$":  # a keyword
        assert name.removeprefix("min").removeprefix("max") in str(caught.value)


def test_other_constraints_of_the_load_test_compile() -> None:
    for regex in REGEXES.values():
        byte_grammar("regex", regex)
    for some in CHOICES:
        byte_grammar("choice", json.dumps(some))
    for grammar in GRAMMARS.values():
        byte_grammar("lark", grammar)


def documented(row: str) -> set[str]:
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


def test_page_names_all_that_was_tried_and_nothing_else() -> None:
    kept = {name for schema in FIFTY.values() for name in keywords(schema)} - ANNOTATIONS
    formats = {s["format"] for s in FIFTY.values() if "format" in s}
    assert documented("supported") | documented("in part") == kept | formats
    refused = {name for name in REFUSED if name.isidentifier() or name[0] == "$"}
    assert documented("rejected by name") == refused - {"minProperties", "maxProperties"}
