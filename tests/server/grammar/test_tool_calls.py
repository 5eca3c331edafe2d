"""Whatever is called: it is one of the tools, and its arguments are valid against its schema."""

import functools
import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quill.model.data.tokenizer import byte_tokenizer
from quill.server.errors import InvalidFieldError
from quill.server.grammar.compiler import Compiler
from quill.server.grammar.matcher import TokenMatcher
from quill.server.grammar.tool_calls import calls_form
from quill.server.text.call_reader import CallReader
from quill.server.text.tokenizer import Text
from quill.server.tools import CALL_FORMS, PLAIN, CallForm, CallPiece, Tool, whole_calls
from tests.server.grammar.test_schemas import NAMES, PAIR, SCHEMAS

END, MAX_TOKENS = 0, 700
FORMS = (PLAIN, *CALL_FORMS)
BY_NAME = {form.name: form for form in FORMS}
# Markers are special tokens of some tokenizers, and plain text to others.
SPECIAL = ("<|endoftext|>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]")
PARAMETERS = st.builds(
    lambda properties, required, more: {
        "properties": properties,
        "required": [name for name in properties if name in required],
        "$defs": {"pair": PAIR},
        **more,
    },
    st.dictionaries(NAMES, SCHEMAS, max_size=3),
    st.lists(NAMES),
    st.sampled_from([{}, {"type": "object"}, {"additionalProperties": {"type": "null"}}]),
)


class Speller:
    """A tokenizer of bytes."""

    def __init__(self, special: tuple[str, ...]) -> None:
        tokenizer_json = byte_tokenizer(special)._json
        self.text = Text(tokenizer_json)
        self.grammars = Compiler(tokenizer_json, 256 + len(special), [END])
        self._special = special

    def ids(self, text: str) -> list[int]:
        return self.text.encode_rendered(text)

    def spelled(self, tokens: list[int]) -> str:
        return b"".join(map(self.text.spelled, tokens)).decode()

    def matcher(self, tools: list[Tool], form: CallForm, **how: bool) -> TokenMatcher:
        fields = {f"tools[{number}].parameters": tool for number, tool in enumerate(tools)}
        made = calls_form(fields, form, self.text.split, **how)
        return self.grammars.compile_now(made).matcher()

    def allowed(self, matcher: TokenMatcher) -> list[int]:
        (mask,) = matcher.masks((), (), 0)
        assert not matcher.has_failed
        count = 256 + len(self._special)
        bits = np.unpackbits(mask.view(np.uint8), count=count, bitorder="little")
        return [int(token) for token in np.flatnonzero(bits)]

    def follow(self, matcher: TokenMatcher, text: str) -> None:
        for token in self.ids(text):
            assert token in self.allowed(matcher), self.text.piece(token)
            matcher.accept(token)


@functools.cache
def speller(is_special: bool) -> Speller:
    return Speller(SPECIAL if is_special else SPECIAL[:1])


def walk(spell: Speller, matcher: TokenMatcher, rng: random.Random) -> str | None:
    """Random tokens among those that are allowed; None: it was cut."""
    tokens: list[int] = []
    while len(tokens) < MAX_TOKENS:
        token = rng.choice(spell.allowed(matcher))
        if token == END:
            return spell.spelled(tokens)
        matcher.accept(token)
        tokens.append(token)
    return None


def calls_in(text: str, form: CallForm, may_speak: bool, rng: random.Random) -> list[CallPiece]:
    """Read in random pieces."""
    reader, pieces = CallReader(form, may_speak, str), list[CallPiece]()
    while text:
        length = rng.randint(1, 9)
        pieces += reader.add(text[:length]).pieces
        text = text[length:]
    assert reader.end() == ""
    return whole_calls(pieces)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(PARAMETERS, min_size=1, max_size=3),
    st.sampled_from(FORMS),
    st.booleans(),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_arguments_are_valid(
    schemas: list[dict[str, Any]],
    form: CallForm,
    is_special: bool,
    may_speak: bool,
    rng: random.Random,
) -> None:
    spell = speller(is_special)
    tools = [Tool(f"f{number}-", "", each) for number, each in enumerate(schemas)]
    try:
        matcher = spell.matcher(tools, form, may_speak=may_speak, several=True)
    except InvalidFieldError:
        return  # such as a property that nothing satisfies
    before = "{" if not form.marker else f"A text < {form.marker}"
    if may_speak:
        spell.follow(matcher, before)
    said = walk(spell, matcher, rng)
    if said is None:
        return
    calls = calls_in(before + said if may_speak else said, form, may_speak, rng)
    assert calls
    for call in calls:
        schema = {"type": "object", **schemas[int(call.name[1:-1])]}
        jsonschema.validate(json.loads(call.arguments), schema, jsonschema.Draft202012Validator)


WEATHER = Tool("weather", "", {"properties": {"city": {"enum": ["Rome", "Oslo"]}}})
NOW = Tool("now", "", None)
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("form", [form for form in CALL_FORMS if form.marker])
def test_text_is_free_until_calls_begin(form: CallForm, is_special: bool) -> None:
    spell = speller(is_special)
    matcher = spell.matcher([WEATHER, NOW], form, may_speak=True, several=True)
    spell.follow(matcher, 'Hm, {"name": "x"} is é no call.\n< [TOOL_CAL')
    assert END in spell.allowed(matcher)
    assert len(spell.allowed(matcher)) > 100
    spell.follow(matcher, form.marker)
    assert len(spell.allowed(matcher)) == 1
    spell.follow(matcher, f"{form.before}{CALL}{form.between}{CALL}{form.after}")
    assert spell.allowed(matcher)[0] == END
    with pytest.raises(AssertionError):
        spell.follow(matcher, "And so on.")


def test_text_that_is_no_call_doesnt_begin_as_one() -> None:
    spell, form = speller(False), BY_NAME["llama3"]
    matcher = spell.matcher([WEATHER], form, may_speak=True, several=True)
    assert END in spell.allowed(matcher)
    spell.follow(matcher, "It is {this}.")
    begun = spell.matcher([WEATHER], form, may_speak=True, several=True)
    spell.follow(begun, '{"name": "weather", "parameters": {"city": "Rome"}}')
    assert spell.allowed(begun) == [END]


def test_one_call_where_one_is_wanted() -> None:
    spell, form = speller(False), BY_NAME["hermes"]
    matcher = spell.matcher([WEATHER], form, may_speak=False, several=False)
    spell.follow(matcher, f"<tool_call>\n{CALL}\n</tool_call>")
    assert spell.allowed(matcher) == [END]


def test_arguments_have_no_other_properties_unless_the_schema_says_so() -> None:
    head = PLAIN.head("f")
    for parameters, more in (
        ({"properties": {}}, False),
        ({"properties": {}, "additionalProperties": True}, True),
        ({}, True),
        (None, False),
    ):
        tool = Tool("f", "", parameters)
        matcher = speller(False).matcher([tool], PLAIN, may_speak=False, several=False)
        speller(False).follow(matcher, head + "{")
        allowed = [speller(False).text.piece(each) for each in speller(False).allowed(matcher)]
        assert allowed == (['"', "}"] if more else ["}"])


def test_schema_that_cant_be_kept_to_is_named() -> None:
    bad = Tool("f", "", {"properties": {"a": {"not": {}}}})
    with pytest.raises(InvalidFieldError, match="not") as raised:
        speller(False).matcher([WEATHER, bad], PLAIN, may_speak=False, several=False)
    assert raised.value.field == "tools[1].parameters"
