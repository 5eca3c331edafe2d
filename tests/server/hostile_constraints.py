"""Two hundred constraints that are meant to harm a server, by shapes and sizes.

Knows: generation.proto, which shapes have cost grammar compilers memory or time.
Does not know: servers, limits.
"""

import json
from collections.abc import Callable
from typing import Any

from quill.protos import generation_pb2 as pb

MAX_BYTES = 2**16  # of one constraint; a longer one would be rejected for that alone
# Pieces of regular expressions that are repeated.
_PIECES = ("a?", ".?", r"\p{L}?", "(a|bc)?", "[a-z]*", "(a?b?)+", "a{0,9}", r"(\d+)?", "(x*y*)*")
_PATTERNS: dict[str, Callable[[int], str]] = {
    **{piece: piece.__mul__ for piece in _PIECES},
    "nested optionals": lambda number: "(a" * number + ")?" * number,
    "alternatives": lambda number: "|".join(f"{i}[ab]*{i}" for i in range(number)),
    "counted": lambda number: f"((a{{1,{number}}}b?){{1,{number}}}c?){{1,{number}}}",
    "states that double": lambda number: f"(a|b)*a(a|b){{{number}}}",
    "scripts": lambda number: rf"([\p{{Greek}}\p{{L}}--a]|\p{{N}}){{1,{number}}}" * 9,
    "forced": lambda number: f"(ab ){{{number * 50}}}",
}
_SIZES = (40, 200, 900, 3_000, 8_000, 16_000, 32_000)


def _schemas(number: int) -> dict[str, Any]:
    refs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i // 2}"}] * 2} for i in range(number)}
    pattern = "^" + "a?" * number + "$"
    return {
        "patternProperties": {"type": "object", "patternProperties": {pattern: {}}},
        "many patterns": {"patternProperties": {f"^{i}[a-z]?.*$": {} for i in range(number)}},
        "pattern": {"type": "string", "pattern": pattern},
        "references": {"$defs": refs, "$ref": f"#/$defs/d{number - 1}"},
        "enum": {"enum": [f"{i:x}" * 3 for i in range(number)]},
        "optional properties": {"properties": {f"p{i}": {"maxLength": i} for i in range(number)}},
        "cases of cases": {"allOf": [{"anyOf": [{"minimum": i}] * 9} for i in range(number)]},
        "long lists": {"items": {"items": {"maxLength": number}, "maxItems": number * 99}},
        "multiples": {"anyOf": [{"type": "number", "multipleOf": i + 3} for i in range(number)]},
    }


def _grammars(number: int) -> dict[str, str]:
    chain = "\n".join(f'r{i}: "x" r{i + 1}? | r{i + 1} r{i + 1}?' for i in range(number))
    return {
        "Lark rules": f'start: r0\n{chain}\nr{number}: "y"',
        "Lark regex": f"start: /{'.?' * number}/",
        "Lark optionals": f"start: {' '.join(['[/a/]'] * number)}",
        "Lark ambiguity": "start: e\ne: " + " | ".join(["e e", '"a"', *['e "+" e'] * number]),
        "GBNF optionals": f"root ::= {' '.join(['[a-z]?'] * number)}",
        "GBNF rules": "\n".join(["root ::= r0", *(f'r{i} ::= "a" r{i}?' for i in range(number))]),
    }


def hostile_constraints() -> dict[str, pb.Constraint]:
    """By shape and size, each within the limit of bytes."""
    found: dict[str, pb.Constraint] = {}
    for number in _SIZES:
        for name, regex in _PATTERNS.items():
            text = regex(number)
            found[f"regex {name} {number}"] = pb.Constraint(regex=text)
            found[f"Lark with {name} {number}"] = pb.Constraint(lark=f"start: /{text}/ /x{text}/")
        for name, schema in _schemas(number).items():
            found[f"schema {name} {number}"] = pb.Constraint(json_schema=json.dumps(schema))
        for name, grammar in _grammars(number).items():
            found[f"{name} {number}"] = pb.Constraint(lark=grammar)
    return {name: each for name, each in found.items() if each.ByteSize() < MAX_BYTES}
