"""Whatever the schema: an answer that ends by itself is valid."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quill.server.errors import InvalidFieldError
from quill.server.grammar.compiler import Form
from tests.server.running import make_grammars
from tests.server.scripted_session import END, VOCAB_SIZE

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


def answer(schema: dict[str, Any], rng: random.Random) -> bytes | None:
    """Random tokens among those that are allowed; None: it was cut."""
    matcher = make_grammars().compile_now(Form("json_schema", json.dumps(schema))).matcher()
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
def test_an_answer_that_ends_is_valid(schema: dict[str, Any], rng: random.Random) -> None:
    schema = {**schema, "$defs": {"pair": PAIR}}
    try:
        said = answer(schema, rng)
    except InvalidFieldError:
        return  # such as an enum of nothing that is left
    if said is not None:
        validator = jsonschema.Draft202012Validator
        checker = validator.FORMAT_CHECKER
        jsonschema.validate(json.loads(said), schema, validator, format_checker=checker)


@pytest.mark.parametrize(
    "schema",
    [{"properties": {"a": {"type": "null"}}}, {"patternProperties": {"^a": {"type": "null"}}}],
)
def test_a_name_that_is_known_is_no_other_in_another_spelling(schema: dict[str, Any]) -> None:
    form = json.dumps({"type": "object", "additionalProperties": {"type": "integer"}, **schema})
    matcher = make_grammars().compile_now(Form("json_schema", form)).matcher()
    for said, is_allowed in (
        ('{"a": null}', True),
        (r'{"b\"": 1}', True),
        ('{"a": 1}', False),
        (r'{"\u0061": 1}', False),
    ):
        tokens = [byte + 1 for byte in said.encode()]
        assert (matcher.num_allowed(tokens) == len(tokens)) == is_allowed, said


@pytest.mark.parametrize("text", ["\b", "\0", "\x1f", "\x7f"])
@pytest.mark.parametrize("as_name", [False, True])
def test_constants_and_names_may_have_control_characters(text: str, as_name: bool) -> None:
    value = {text: None} if as_name else text
    named = _object({text: {"type": "null"}}, [text], False)
    said = answer(named if as_name else {"const": text}, random.Random(0))
    assert said is not None
    assert json.loads(said) == value
