"""Dates are days of the calendar, patterns can't be evaded, calls are of the tools given."""

import datetime
import functools
import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quill.model.data.tokenizer import byte_tokenizer
from quill.server.errors import InvalidFieldError
from quill.server.grammar.compiler import Compiler
from quill.server.grammar.constraint_source import (
    DATE,
    ToolSchema,
    add_calendar,
    narrow_patterns,
    tool_constraint,
)
from quill.server.grammar.matcher import TokenMatcher
from quill.server.text.streaming import ToolCallParser
from quill.server.text.tokenizer import Text
from quill.server.tools import PLAIN, TOOL_CALL_FORMATS, ToolCallDelta, ToolCallFormat, merge_deltas
from tests.server.grammar.test_generated_json import NAMES, PAIR, SCHEMAS
from tests.server.small_grammars import allows

# Dates.

DAY = {"type": "string", "format": "date"}
WRONG, RIGHT = '"2023-02-29"', '"2024-02-29"'


def _is_date(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def test_date_pattern_has_the_days_of_the_calendar_and_no_others() -> None:
    years = (0, 1, 4, 100, 400, 1000, 1900, 2000, 2023, 2024, 2100, 9996, 9999)
    days = [(year, month, day) for year in years for month in range(14) for day in range(33)]
    days += [(year, 2, 29) for year in range(10000)]
    for year, month, day in days:
        text = f"{year:04}-{month:02}-{day:02}"
        assert bool(re.fullmatch(DATE, text)) == _is_date(text), text


@pytest.mark.parametrize(
    ("schema", "around"),
    [
        (DAY, "{}"),
        ({"format": "date"}, "{}"),
        ({**DAY, "pattern": "^20", "allOf": [{"maxLength": 10}]}, "{}"),
        ({"anyOf": [{"type": "integer"}, DAY]}, "{}"),
        ({"$ref": "#/$defs/day", "$defs": {"day": DAY}}, "{}"),
        ({"type": "array", "prefixItems": [DAY], "items": False, "minItems": 1}, "[{}]"),
        ({"type": "array", "items": DAY}, "[{}]"),
        ({"type": "array", "items": [{}], "additionalItems": DAY}, "[1, {}]"),
        ({"$ref": "#/components/schemas/day", "components": {"schemas": {"day": DAY}}}, "{}"),
        ({"$ref": "#/a~1%20b/0", "a/ b": [DAY]}, "{}"),
        ({"properties": {"format": DAY}, "required": ["format"]}, '{{"format": {}}}'),
        ({"additionalProperties": DAY, "type": "object"}, '{{"a": {}}}'),
    ],
)
def test_dates_keep_to_the_calendar_wherever_they_are(schema: dict[str, Any], around: str) -> None:
    assert allows(schema, around.format(RIGHT))
    assert not allows(schema, around.format(WRONG))


def test_date_times_keep_to_the_calendar_too() -> None:
    schema = {"type": "string", "format": "date-time"}
    assert allows(schema, '"2024-02-29T08:00:00Z"')
    assert not allows(schema, '"2023-02-29T08:00:00Z"')


def test_schema_that_refers_to_itself_is_changed_once() -> None:
    schema: dict[str, Any] = {**DAY, "anyOf": [{"$ref": "#"}, {"$ref": "#/anyOf/7"}, {"$ref": 3}]}
    add_calendar(schema)
    assert len(schema["allOf"]) == 1


@pytest.mark.parametrize("other", [{}, DAY])
def test_half_of_a_surrogate_pair_is_an_error_beside_a_date_too(other: dict[str, Any]) -> None:
    for schema in ({"description": "\ud800", **other}, {"items": other, "const": "\ud800"}):
        with pytest.raises(InvalidFieldError, match="hex escape at line 1"):
            allows(schema, WRONG)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": {"format": "date"}},
        {"enum": [{"format": "date"}]},
        {"format": 7},
        {"pattern": r"\[^a"},
        {"const": {"pattern": "[^a]"}},
        {"pattern": "[^]]"},
    ],
)
def test_what_only_looks_like_a_date_or_a_class_stays_as_it_is(schema: dict[str, Any]) -> None:
    before = json.dumps(schema)
    add_calendar(schema)
    narrow_patterns(schema)
    assert json.dumps(schema) == before


# Patterns.

TEXTS = ["", "a", '"', "\\", 'a"', "b\\", '\\"', "\n", "a\tb", "é", "[^", "]", "/", "a^"]
PATTERNS = ['^[^"]*$', r"^[^\\]+$", r'^[^\\/:*?"<>|]+$', r'^([^"a]|é)*$', '^[^"]{1,2}$', '[^"]']
PATTERNS += [r"^\[[^\]]*$", r"^[\[^a]*$", r"^\[\^$", r"^\\[^a]*$"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_string_has_what_its_pattern_allows(pattern: str) -> None:
    for text in TEXTS:
        is_allowed = bool(re.search(re.sub(r"\$$", r"\\Z", pattern), text))
        written = json.dumps(text, ensure_ascii=False)
        assert allows({"type": "string", "pattern": pattern}, written) == is_allowed, text


@pytest.mark.parametrize(
    ("known", "cases"),
    [
        (
            {"patternProperties": {'^[^"]*$': {"type": "null"}}},
            {
                '{"a": null}': True,
                r'{"a\"": 1}': True,
                '{"a": 1}': False,
                r'{"a\"": null}': False,
                r'{"a\b": null}': False,
                r'{"a\b": 1}': False,
            },
        ),
        *(
            (
                known,
                {
                    '{"a": null}': True,
                    r'{"b\"": 1}': True,
                    '{"a": 1}': False,
                    r'{"\u0061": 1}': False,
                },
            )
            for known in (
                {"properties": {"a": {"type": "null"}}},
                {"patternProperties": {"^a": {"type": "null"}}},
            )
        ),
    ],
)
def test_name_that_a_schema_knows_is_no_other_in_another_spelling(
    known: dict[str, Any], cases: dict[str, bool]
) -> None:
    schema = {"type": "object", "additionalProperties": {"type": "integer"}, **known}
    assert {text: allows(schema, text) for text in cases} == cases


# Tool calls.

END, MAX_TOKENS = 0, 700
FORMATS = (PLAIN, *TOOL_CALL_FORMATS)
BY_NAME = {each.name: each for each in FORMATS}
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
WEATHER = '{"properties": {"city": {"enum": ["Rome", "Oslo"]}}}'
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'


class Speller:
    """A tokenizer of bytes."""

    def __init__(self, special: tuple[str, ...], added: tuple[str, ...] = ()) -> None:
        """`added`: those of the special tokens that are added without being special."""
        tokenizer_json = _without_special(byte_tokenizer(special)._json, added)
        self._text = Text(tokenizer_json)
        self._vocab_size = 256 + len(special)
        self._compiler = Compiler(tokenizer_json, self._vocab_size, [END])

    def spelled(self, tokens: list[int]) -> str:
        return b"".join(map(self._text.spelled, tokens)).decode()

    def matcher(
        self, tools: dict[str, str], format_: ToolCallFormat, may_speak: bool, several: bool
    ) -> TokenMatcher:
        """`tools`: their parameters, by name."""
        schemas = [
            ToolSchema(f"tools[{number}].parameters", *tool)
            for number, tool in enumerate(tools.items())
        ]
        asked = tool_constraint(
            schemas, format_, self._text.split, may_speak=may_speak, several=several
        )
        return self._compiler.compile_now(asked).matcher()

    def allowed(self, matcher: TokenMatcher) -> list[int]:
        (mask,) = matcher.masks((), (), 0)
        assert not matcher.has_failed
        bits = np.unpackbits(mask.view(np.uint8), count=self._vocab_size, bitorder="little")
        return [int(token) for token in np.flatnonzero(bits)]

    def accept(self, matcher: TokenMatcher, text: str) -> None:
        for token in self._text.encode_rendered(text):
            assert token in self.allowed(matcher), self._text.piece(token)
            matcher.accept(token)


def _without_special(tokenizer_json: str, names: tuple[str, ...]) -> str:
    tokenizer = json.loads(tokenizer_json)
    for token in tokenizer["added_tokens"]:
        token["special"] = token["content"] not in names
    return json.dumps(tokenizer)


@functools.cache
def speller(is_special: bool = False, is_added: bool = False) -> Speller:
    if is_added:
        return Speller(SPECIAL, SPECIAL[1:])
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


@settings(max_examples=60, deadline=None)
@given(
    st.lists(PARAMETERS, min_size=1, max_size=3),
    st.sampled_from(FORMATS),
    st.booleans(),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_arguments_are_valid(
    schemas: list[dict[str, Any]],
    format_: ToolCallFormat,
    is_special: bool,
    may_speak: bool,
    rng: random.Random,
) -> None:
    spell = speller(is_special)
    tools = {f"f{number}-": json.dumps(each) for number, each in enumerate(schemas)}
    try:
        matcher = spell.matcher(tools, format_, may_speak, several=True)
    except InvalidFieldError:
        return  # such as a property that nothing satisfies
    before = ("{" if not format_.marker else f"A text < {format_.marker}") if may_speak else ""
    spell.accept(matcher, before)
    generated = walk(spell, matcher, rng)
    if generated is None:
        return
    parser, deltas = ToolCallParser(format_, may_speak, str), list[ToolCallDelta]()
    for character in before + generated:
        deltas += parser.add(character).deltas
    assert parser.end() == ""
    calls = merge_deltas(deltas)
    assert calls
    for call in calls:
        schema = {"type": "object", **schemas[int(call.name[1:-1])]}
        jsonschema.validate(json.loads(call.arguments), schema, jsonschema.Draft202012Validator)


@pytest.mark.parametrize(("is_special", "is_added"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("format_", [each for each in TOOL_CALL_FORMATS if each.marker])
def test_text_is_free_until_the_marker(
    format_: ToolCallFormat, is_special: bool, is_added: bool
) -> None:
    spell = speller(is_special, is_added)
    matcher = spell.matcher({"weather": WEATHER, "now": ""}, format_, True, several=True)
    spell.accept(matcher, 'Hm, {"name": "x"} is é no call.\n< [TOOL_CAL')
    assert END in spell.allowed(matcher)
    assert len(spell.allowed(matcher)) > 100
    spell.accept(matcher, format_.marker)
    assert len(spell.allowed(matcher)) == 1
    spell.accept(matcher, f"{format_.before}{CALL}{format_.between}{CALL}{format_.after}")
    assert spell.allowed(matcher)[0] == END
    with pytest.raises(AssertionError):
        spell.accept(matcher, "And so on.")


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize(("before", "after"), [("", ""), ("```json\n", "\n```")])
def test_a_call_without_its_marker_follows_its_schema_too(
    before: str, after: str, is_added: bool
) -> None:
    spell = speller(is_added=is_added)
    matcher = spell.matcher({"weather": WEATHER, "now": ""}, BY_NAME["hermes"], True, several=True)
    spell.accept(matcher, f'{before}{{\n  "name": "weather",\n  "arguments": {{"city": "')
    with pytest.raises(AssertionError):
        spell.accept(matcher, 'Rome", "country": ')
    matcher = spell.matcher({"weather": WEATHER, "now": ""}, BY_NAME["hermes"], True, several=True)
    spell.accept(
        matcher, f'{before}{{"name": "weather", "arguments": {{"city": "Rome"}}\n}}{after}'
    )
    assert END in spell.allowed(matcher)
    matcher = spell.matcher({"weather": WEATHER}, BY_NAME["hermes"], True, several=True)
    spell.accept(matcher, f'{before}{{"name": "rain", "x": 1}}{after} is JSON.')
    assert END in spell.allowed(matcher)


@pytest.mark.parametrize(
    ("name", "may_speak", "text", "may_end_at_once"),
    [
        ("llama3", True, '{"name": "weather", "parameters": {"city": "Rome"}}', True),
        ("hermes", False, f"<tool_call>\n{CALL}\n</tool_call>", False),
    ],
)
def test_one_call_where_there_is_one(
    name: str, may_speak: bool, text: str, may_end_at_once: bool
) -> None:
    spell = speller()
    matcher = spell.matcher({"weather": WEATHER}, BY_NAME[name], may_speak, several=may_speak)
    assert (END in spell.allowed(matcher)) == may_end_at_once
    spell.accept(matcher, text)
    assert spell.allowed(matcher) == [END]


@pytest.mark.parametrize("format_", [each for each in TOOL_CALL_FORMATS if each.marker])
def test_markers_that_are_added_and_not_special_are_forced_as_tokens(
    format_: ToolCallFormat,
) -> None:
    spell = speller(is_added=True)  # as Qwen's <tool_call>
    matcher = spell.matcher({"weather": WEATHER}, format_, False, several=True)
    (marker,) = spell.allowed(matcher)
    assert spell.spelled([marker]) == format_.marker
    assert matcher.jump_forward()[0] == marker
    calls = f"{format_.marker}{format_.before}{CALL}{format_.between}{CALL}{format_.after}"
    spell.accept(matcher, calls)
    assert spell.allowed(matcher)[0] == END


def test_text_without_a_marker_does_not_begin_as_a_call() -> None:
    matcher = speller().matcher({"weather": WEATHER}, BY_NAME["llama3"], True, several=True)
    speller().accept(matcher, "It is {this}.")
    assert END in speller().allowed(matcher)


@pytest.mark.parametrize(
    ("parameters", "may_have_more"),
    [
        ('{"properties": {}}', False),
        ('{"properties": {}, "additionalProperties": true}', True),
        ("{}", True),
        ("", False),
    ],
)
def test_arguments_have_no_other_properties_unless_the_schema_says_so(
    parameters: str, may_have_more: bool
) -> None:
    matcher = speller().matcher({"f": parameters}, PLAIN, False, several=False)
    speller().accept(matcher, PLAIN.head("f") + "{")
    allowed = [speller().spelled([each]) for each in speller().allowed(matcher)]
    assert allowed == (['"', "}"] if may_have_more else ["}"])


@pytest.mark.parametrize("bad", ['{"properties": {"a": {"not": {}}}}', '{"minimum": 1e30}'])
def test_tool_whose_schema_is_an_error_is_named(bad: str) -> None:
    with pytest.raises(InvalidFieldError) as raised:
        speller().matcher({"weather": WEATHER, "f": bad}, PLAIN, False, several=False)
    assert raised.value.field == "tools[1].parameters"
