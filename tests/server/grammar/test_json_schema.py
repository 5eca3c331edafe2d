"""Schemas beyond the limits are errors that name the place. Some of these killed the process, which
no test survives: what is allowed is far from what did."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from quill.server.errors import InvalidFieldError
from quill.server.grammar.json_schema import (
    MAX_DEPTH,
    MAX_LEVELS,
    MAX_LOCATE_S,
    MAX_QUANTIFIED,
    locate,
    subschemas,
)
from quill.server.request import ConstraintKind
from tests.processor_time import within_s
from tests.server.small_grammars import EOS, PIECES, byte_grammar, small_grammar

Wrap = Callable[[str], dict[str, Any]]
# How a schema refers to the next one, and how many levels that takes.
WRAPS: dict[str, tuple[int, Wrap]] = {
    "items": (2, lambda ref: {"items": {"$ref": ref}}),
    "anyOf": (3, lambda ref: {"anyOf": [{"$ref": ref}]}),
    "properties": (3, lambda ref: {"properties": {"a": {"$ref": ref}}, "required": ["a"]}),
    "additional": (2, lambda ref: {"additionalProperties": {"$ref": ref}}),
    "deep": (6, lambda ref: {"items": {"items": {"items": {"items": {"items": {"$ref": ref}}}}}}),
}
LARGEST = 2**63 - 1
WRONG = {"type": "string", "format": "poem"}


def problem(kind: Any, text: str) -> str:
    with pytest.raises(InvalidFieldError) as caught:
        small_grammar(kind, text)
    return caught.value.reason


def chain(length: int, wrap: Wrap) -> str:
    """Each refers to the next, in objects that are no wider than one may be."""
    groups: dict[str, Any] = {f"g{n}": {} for n in range(length // 500 + 1)}
    for n in range(length):
        groups[f"g{n // 500}"][f"~{n}"] = wrap(f"#/g{(n + 1) // 500}/~0{n + 1}")
    groups[f"g{length // 500}"][f"~{length}"] = {"type": "null"}
    return json.dumps({"$ref": "#/g0/~00", **groups}, separators=(",", ":"))


@pytest.mark.parametrize("name", WRAPS)
def test_chains_of_references_are_limited(name: str) -> None:
    num_levels, wrap = WRAPS[name]
    assert f"levels; {MAX_LEVELS} levels at most" in problem("json_schema", chain(800, wrap))
    if name != "anyOf":  # what it merges has a limit of the library's own
        longest = chain((MAX_LEVELS - 20) // num_levels, wrap)
        assert not small_grammar("json_schema", longest).matcher().has_failed


@pytest.mark.parametrize("reference", ["#", "#here", "#/$defs/node"])
def test_references_to_oneself_count_once(reference: str) -> None:
    node = {"items": {"$ref": reference}, "type": "array", "$anchor": "here"}
    lists = [{"type": "array", "items": {"$ref": reference}}] * 300
    small_grammar("json_schema", json.dumps({**node, "$defs": {"node": node, "l": lists}}))


def rules(number: int, last: str = '"a"', kind: str = "r", more: str = "") -> str:
    lines = [f"{kind}{n}: {kind}{n + 1}{more}" for n in range(number)]
    return "\n".join([f"start: {kind}0", *lines, f"{kind}{number}: {last}"])


@pytest.mark.parametrize("kind", ["r", "R"])
def test_chains_of_lark_rules_are_limited(kind: str) -> None:
    small_grammar("lark", rules(MAX_LEVELS - 2, kind=kind))
    long = rules(4000, kind=kind)
    gbnf = long.replace("start:", "root ::= ").replace(":", "::=")
    for lark in (long, rules(MAX_LEVELS // 2, kind=kind, more=" (/b/)"), gbnf):
        assert f"rules and brackets; {MAX_LEVELS} at most" in problem("lark", lark)


def test_schemas_within_a_lark_grammar_count_as_schemas() -> None:
    schema = json.dumps({"enum": [[n] for n in range(MAX_LEVELS)]}, indent=1)
    small_grammar("lark", rules(MAX_LEVELS - 20, f"%json {schema} | %json {{}}"))
    assert "rules and brackets" in problem("lark", rules(MAX_LEVELS, f"%json {schema}"))
    small_grammar("lark", r'start: "%json {" | %json {"type": "boolean"} "a"')
    deep = '{"items": ' * MAX_DEPTH + "{}" + "}" * MAX_DEPTH
    killed = json.dumps({"type": "integer", "minimum": -1e19, "maximum": -1e19})
    for space in ("", " ", "\n\t"):
        assert "maximum -1e" in problem("lark", f'start: "a" %json{space}{killed} "b"')
        assert f"more than {MAX_DEPTH}" in problem("lark", f"start: %json{space}{deep}")


@pytest.mark.parametrize(
    ("schema", "reason"),
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
def test_numbers_that_the_library_does_not_keep_exactly_are_errors(
    schema: dict[str, Any], reason: str
) -> None:
    assert reason in problem("json_schema", json.dumps(schema))


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
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "0.5", "0"),
        ({"type": "number", "exclusiveMinimum": 0.5, "maximum": 0.75}, "0.6", "0.5"),
        ({"type": "number", "exclusiveMinimum": -2, "maximum": -1.5}, "-1.7", "-2"),
        ({"type": "number", "minimum": 1.5, "exclusiveMaximum": 2}, "1.7", "2"),
    ],
)
def test_other_numbers_are_kept_exactly(
    schema: dict[str, Any], valid: int | str, invalid: int | str
) -> None:
    matcher = small_grammar("json_schema", json.dumps(schema)).matcher()
    for number, is_valid in ((valid, True), (invalid, False)):
        tokens = [PIECES.index(character) for character in str(number)] + [EOS]
        assert (matcher.num_allowed(tokens) == len(tokens)) == is_valid


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (WRONG, "Unknown format: poem"),
        ({"properties": {"a": {}, "b": WRONG}}, ", at /properties/b"),
        ({"properties": {"a": {"items": {"properties": {"b": WRONG}}}}}, "/a/items/properties/b"),
        ({"properties": {"a/b~c": WRONG}}, ", at /properties/a~1b~0c"),
        ({"anyOf": [{"type": "null"}, {"prefixItems": [{}, WRONG]}]}, "/anyOf/1/prefixItems/1"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"items": WRONG}}}, ", at /$defs/x/items"),
        ({"properties": {"a": {"$ref": "#/$defs/missing"}}}, "exist, at /properties/a"),
        ({"additionalProperties": {"minimum": 10**30}}, ", at /additionalProperties"),
        ({"patternProperties": {"^a": WRONG}}, ", at /patternProperties/^a"),
        ({"properties": {"x" * 200: WRONG}}, "Unknown format: poem"),
    ],
)
def test_error_ends_with_a_pointer_to_the_mistake(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        byte_grammar("json_schema", json.dumps(schema))
    assert caught.value.reason.endswith(place)


def test_what_only_looks_like_a_schema_is_no_subschema() -> None:
    schema = {"const": {"items": WRONG}, "enum": [WRONG], "items": True, "properties": {"a": 1}}
    assert not list(subschemas(schema))


def test_looking_for_the_place_has_a_time_limit() -> None:
    def slow(schema: dict[str, Any]) -> str:
        began_s = time.thread_time()
        while time.thread_time() - began_s < MAX_LOCATE_S / 4:
            pass
        return "same"

    schema: dict[str, Any] = {}
    for _ in range(60):
        schema = {"items": schema}
    assert 1 <= locate("same", schema, slow).count("/items") <= 5


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "{}"),
        ("lark", "start: /{}/"),
        ("lark", 'start: item\nitem: "a?" /x{}/'),
        ("lark", "root ::= [a-z] {}"),
        ("lark", 'start: %json {{"type": "string", "pattern": "{}"}}'),
        ("json_schema", '{{"type": "string", "pattern": "{}"}}'),
        ("json_schema", '{{"type": "object", "patternProperties": {{"{}": {{}}}}}}'),
        ("json_schema", '{{"items": {{"patternProperties": {{"x": {{"pattern": "{}"}}}}}}}}'),
    ],
)
@pytest.mark.parametrize("part", ["a?", "ab+", "a{3}", "\\\\.?"])
def test_quantified_parts_are_limited_before_anything_compiles(
    kind: ConstraintKind, text: str, part: str
) -> None:
    part = part.replace("\\\\", "\\") if kind != "json_schema" and "%json" not in text else part
    with (
        within_s(0.2),
        pytest.raises(InvalidFieldError, match=f"{MAX_QUANTIFIED + 1} optional"),
    ):
        small_grammar(kind, text.format(part * (MAX_QUANTIFIED + 1)))


def test_what_only_looks_quantified_is_not() -> None:
    small_grammar("regex", r"(?:\?\*[?*+{1}])" + r"\+\{" * 2000)
    small_grammar("lark", 'start: "' + "a?" * 2000 + '"')
