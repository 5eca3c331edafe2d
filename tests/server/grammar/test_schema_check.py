"""Numbers that the library can't hold, or can't bear, are refused; all others are kept to."""

import json
from typing import Any

import pytest

from quill.server.errors import InvalidFieldError
from quill.server.grammar.nesting import MAX_DEPTH
from tests.server.small_grammars import EOS, PIECES, small_grammar

LARGEST = 2**63 - 1


def has_answer(schema: dict[str, Any], answer: int) -> bool:
    matcher = small_grammar("json_schema", json.dumps(schema)).matcher()
    tokens = [PIECES.index(character) for character in str(answer)] + [EOS]
    return matcher.num_allowed(tokens) == len(tokens)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"minimum": 2**53 + 1}, "minimum 9007199254740993"),
        ({"type": "integer", "minimum": 10**30}, "minimum 1000000000000000000000000000000"),
        ({"type": "integer", "minimum": 1e30, "maximum": 1e31}, "minimum 1e+30"),
        ({"type": "integer", "minimum": -(2**80), "maximum": -(2**70)}, "maximum -11805916"),
        ({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}, "maximum -92233720"),
        ({"type": "integer", "minimum": -1e19, "exclusiveMaximum": -9.3e18}, "exclusiveMaximum"),
        ({"type": "number", "maximum": 2**53 + 3}, "maximum 9007199254740995"),
        ({"type": "integer", "exclusiveMinimum": 2**53 + 1}, "exclusiveMinimum 9007"),
        ({"type": "integer", "exclusiveMaximum": LARGEST}, "exclusiveMaximum 92233"),
        ({"type": "integer", "minimum": 10**400}, "more than 40 digits"),
        ({"type": "integer", "multipleOf": 99_999_999}, "multipleOf 99999999.0; "),
        ({"type": "number", "multipleOf": 123.456}, "multipleOf 123.456; "),
        ({"properties": {str(n): {"multipleOf": 9000 + n} for n in range(20)}}, "20 multipleOf; "),
        ({"allOf": [{"multipleOf": 9.97}, {"multipleOf": 101}]}, "least common multiple"),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum 0: beside a bound of 0.5"),
        ({"exclusiveMinimum": 2.0, "exclusiveMaximum": 2.5}, "exclusiveMinimum 2.0: beside"),
        ({"minimum": -2.5, "exclusiveMaximum": -2}, "exclusiveMaximum -2: beside a bound of -2.5"),
        ({"minimum": -0.5, "allOf": [{"exclusiveMaximum": 0}]}, "exclusiveMaximum 0: beside"),
        ({"const": 2**53 + 1}, "9007199254740993 in const"),
        ({"enum": ["a", {"b": [1234567890123456789]}]}, "1234567890123456789 in enum"),
        ({"properties": {"a": {"const": 10**25 + 1}}}, "10000000000000000000000001 in const"),
        ({"type": "integer", "const": 10**25}, "10000000000000000000000000 in const"),
        ({"type": "integer", "const": 1e19}, "1e+19 in const"),
        # These two killed the process.
        ({"type": "integer", "const": -1e30}, "-1e+30 in const"),
        ({"type": "integer", "allOf": [{"enum": [5, -(10**30)]}]}, "000000 in enum"),
        ({"type": "integer", "const": -(2.0**63)}, "-9.223372036854776e+18 in const"),
    ],
)
def test_numbers_that_are_not_kept_to_exactly_are_refused(
    schema: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        small_grammar("json_schema", json.dumps(schema))
    assert said in str(caught.value)


@pytest.mark.parametrize("space", ["", " ", "\n\t"])
def test_schemas_within_grammars_are_looked_at_as_well(space: str) -> None:
    """This one killed the process."""
    schema = {"type": "integer", "minimum": -1e19, "maximum": -1e19}
    with pytest.raises(InvalidFieldError, match="maximum -1e"):
        small_grammar("lark", f'start: "a" %json{space}{json.dumps(schema)} "b"')
    deep = '{"items": ' * MAX_DEPTH + "{}" + "}" * MAX_DEPTH
    with pytest.raises(InvalidFieldError, match=f"more than {MAX_DEPTH}"):
        small_grammar("lark", f"start: %json{space}{deep}")


def test_a_grammar_may_speak_of_schemas() -> None:
    small_grammar("lark", r'start: "%json {" | %json {"type": "boolean"} "a"')


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "integer", "minimum": 0, "maximum": LARGEST}, LARGEST, LARGEST + 1),
        ({"type": "integer", "minimum": 2**53}, 2**53, 2**53 - 1),
        ({"type": "integer", "minimum": 0, "maximum": 2**53 + 1}, 2**53, 2**53 + 2),
        ({"type": "integer", "const": 1e18}, 10**18, 10**18 + 1),
        ({"const": -(10**18)}, -(10**18), -(10**18) + 1),
        ({"enum": [2**53, "a"]}, 2**53, 2**53 + 1),
        ({"type": "integer", "multipleOf": 9973}, 19946, 19947),
        ({"allOf": [{"multipleOf": 0.25}, {"multipleOf": 60}], "type": "integer"}, 120, 90),
        ({"type": "integer", "maximum": 9, "examples": [2**53 + 1]}, 9, 10),
    ],
)
def test_large_numbers_are_kept_to(schema: dict[str, Any], valid: int, invalid: int) -> None:
    assert has_answer(schema, valid)
    assert not has_answer(schema, invalid)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"exclusiveMinimum": 0, "maximum": 1}, "0.5", "0"),
        ({"exclusiveMinimum": 0.5, "maximum": 0.75}, "0.6", "0.5"),
        ({"exclusiveMinimum": -2, "maximum": -1.5}, "-1.7", "-2"),
        ({"minimum": 1.5, "exclusiveMaximum": 2}, "1.7", "2"),
    ],
)
def test_other_bounds_are_kept_to(schema: dict[str, Any], valid: str, invalid: str) -> None:
    matcher = small_grammar("json_schema", json.dumps({"type": "number", **schema})).matcher()
    for text, is_valid in ((valid, True), (invalid, False)):
        tokens = [PIECES.index(character) for character in text] + [EOS]
        assert (matcher.num_allowed(tokens) == len(tokens)) == is_valid
