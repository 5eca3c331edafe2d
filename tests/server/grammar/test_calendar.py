"""Dates that answers may have are days that there are."""

import datetime
import json
import re
from typing import Any

import pytest

from quill.server.errors import InvalidFieldError
from quill.server.grammar.calendar import DATE, add_calendar
from quill.server.grammar.compiler import Form, schema_source
from tests.server.running import make_grammars


def _is_date(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    "year", [0, 1, 4, 100, 400, 1000, 1900, 2000, 2023, 2024, 2100, 9996, 9999]
)
def test_pattern_has_the_days_of_a_year_and_no_others(year: int) -> None:
    for month in range(14):
        for day in range(33):
            text = f"{year:04}-{month:02}-{day:02}"
            assert bool(re.fullmatch(DATE, text)) == _is_date(text), text


def test_pattern_has_every_leap_year() -> None:
    for year in range(10000):
        text = f"{year:04}-02-29"
        assert bool(re.fullmatch(DATE, text)) == _is_date(text), text


def _allows(schema: dict[str, Any], said: str) -> bool:
    matcher = make_grammars().compile_now(Form("json_schema", json.dumps(schema))).matcher()
    tokens = [byte + 1 for byte in said.encode()]
    return matcher.num_allowed(tokens) == len(tokens)


PLAIN = {"type": "string", "format": "date"}
WRONG, RIGHT = '"2023-02-29"', '"2024-02-29"'


@pytest.mark.parametrize(
    ("schema", "before", "after"),
    [
        (PLAIN, "", ""),
        ({"format": "date"}, "", ""),
        ({**PLAIN, "pattern": "^20", "allOf": [{"maxLength": 10}]}, "", ""),
        ({"anyOf": [{"type": "integer"}, PLAIN]}, "", ""),
        ({"$ref": "#/$defs/day", "$defs": {"day": PLAIN}}, "", ""),
        ({"type": "array", "prefixItems": [PLAIN], "items": False, "minItems": 1}, "[", "]"),
        ({"type": "array", "items": PLAIN}, "[", "]"),
        ({"type": "array", "items": [{}], "additionalItems": PLAIN}, "[1, ", "]"),
        ({"$ref": "#/components/schemas/day", "components": {"schemas": {"day": PLAIN}}}, "", ""),
        ({"$ref": "#/a~1%20b/0", "a/ b": [PLAIN]}, "", ""),
        ({"properties": {"format": PLAIN}, "required": ["format"]}, '{"format": ', "}"),
        ({"additionalProperties": PLAIN, "type": "object"}, '{"a": ', "}"),
    ],
)
def test_answer_has_no_day_that_there_is_not(
    schema: dict[str, Any], before: str, after: str
) -> None:
    assert _allows(schema, before + RIGHT + after)
    assert not _allows(schema, before + WRONG + after)


def test_schema_that_refers_to_itself_is_read_once() -> None:
    schema: dict[str, Any] = {**PLAIN, "anyOf": [{"$ref": "#"}, {"$ref": "#/anyOf/7"}, {"$ref": 3}]}
    assert add_calendar(schema)
    assert len(schema["allOf"]) == 1


def test_half_a_character_is_refused_in_the_same_words_beside_a_date() -> None:
    said = []
    for other in ({}, PLAIN):
        schema = json.dumps({"properties": {"a": {"const": "\ud800"}, "b": other}})
        with pytest.raises(ValueError, match="escape") as error:
            schema_source(schema)
        said.append(str(error.value))
    assert said[0] == said[1]


def test_time_of_a_day_keeps_to_the_calendar_too() -> None:
    schema = {"type": "string", "format": "date-time"}
    assert _allows(schema, '"2024-02-29T08:00:00Z"')
    assert not _allows(schema, '"2023-02-29T08:00:00Z"')


def test_half_of_a_surrogate_pair_is_refused_beside_a_date_as_elsewhere() -> None:
    for schema in ({"description": "\ud800"}, {"description": "\ud800", **PLAIN}):
        with pytest.raises(InvalidFieldError, match="hex escape at line 1"):
            _allows(schema, WRONG)


def test_what_only_looks_like_a_date_stays_what_it_is() -> None:
    for schema in ({"const": {"format": "date"}}, {"enum": [{"format": "date"}]}, {"format": 7}):
        before = json.dumps(schema)
        assert not add_calendar(schema)
        assert json.dumps(schema) == before
    assert _allows({"const": {"format": "date"}}, '{"format": "date"}')
