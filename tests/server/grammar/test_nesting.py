"""Forms that would fill the library's stack are refused. Those that are refused here killed the
process, which no test survives: what is allowed is far from what did."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from quill.server.errors import InvalidFieldError
from quill.server.grammar.nesting import MAX_LEVELS
from tests.server.small_grammars import small_grammar

Wrap = Callable[[str], dict[str, Any]]
WRAPS: dict[str, Wrap] = {
    "items": lambda ref: {"items": {"$ref": ref}},
    "anyOf": lambda ref: {"anyOf": [{"$ref": ref}]},
    "properties": lambda ref: {"properties": {"a": {"$ref": ref}}, "required": ["a"]},
    "additional": lambda ref: {"additionalProperties": {"$ref": ref}},
    "deep": lambda ref: {"items": {"items": {"items": {"items": {"items": {"$ref": ref}}}}}},
}
NUM_LEVELS = {"items": 2, "properties": 3, "additional": 2, "deep": 6}


def chain(length: int, wrap: Wrap) -> str:
    """Each refers to the next, in objects that are no wider than one may be."""
    groups: dict[str, Any] = {f"g{n}": {} for n in range(length // 500 + 1)}
    for n in range(length):
        groups[f"g{n // 500}"][f"~{n}"] = wrap(f"#/g{(n + 1) // 500}/~0{n + 1}")
    groups[f"g{length // 500}"][f"~{length}"] = {"type": "null"}
    return json.dumps({"$ref": "#/g0/~00", **groups}, separators=(",", ":"))


@pytest.mark.parametrize("name", WRAPS)
def test_long_chains_of_references_are_refused(name: str) -> None:
    with pytest.raises(InvalidFieldError, match=f"levels; {MAX_LEVELS} levels at most"):
        small_grammar("json_schema", chain(800, WRAPS[name]))


@pytest.mark.parametrize("name", NUM_LEVELS)
def test_chains_of_references_that_fit_are_followed(name: str) -> None:
    longest = (MAX_LEVELS - 20) // NUM_LEVELS[name]
    assert small_grammar("json_schema", chain(longest, WRAPS[name])).matcher().forced() is not None


@pytest.mark.parametrize("reference", ["#", "#here", "#/$defs/node"])
def test_references_to_oneself_count_once(reference: str) -> None:
    node = {"items": {"$ref": reference}, "type": "array", "$anchor": "here"}
    lists = [{"type": "array", "items": {"$ref": reference}}] * 300
    small_grammar("json_schema", json.dumps({**node, "$defs": {"node": node, "l": lists}}))


def rules(number: int, last: str = '"a"', kind: str = "r", more: str = "") -> str:
    lines = [f"{kind}{n}: {kind}{n + 1}{more}" for n in range(number)]
    return "\n".join([f"start: {kind}0", *lines, f"{kind}{number}: {last}"])


@pytest.mark.parametrize("kind", ["r", "R"])
def test_long_chains_of_rules_are_refused(kind: str) -> None:
    small_grammar("lark", rules(MAX_LEVELS - 2, kind=kind))
    for grammar in (rules(4000, kind=kind), rules(MAX_LEVELS // 2, kind=kind, more=" (/b/)")):
        with pytest.raises(InvalidFieldError, match="rules and brackets; 800 at most"):
            small_grammar("lark", grammar)
    with pytest.raises(InvalidFieldError, match="rules and brackets"):
        small_grammar(
            "lark", rules(4000, kind=kind).replace("start:", "root ::= ").replace(":", "::=")
        )


def test_schemas_within_a_grammar_are_no_rules() -> None:
    schema = json.dumps({"enum": [[n] for n in range(MAX_LEVELS)]}, indent=1)
    small_grammar("lark", rules(MAX_LEVELS - 20, f"%json {schema} | %json {{}}"))
    with pytest.raises(InvalidFieldError, match="rules and brackets"):
        small_grammar("lark", rules(MAX_LEVELS, f"%json {schema}"))
