"""Forms that are meant to hold a server up: too deep, too wide, too long, or endless.

Knows: the wire, what makes compilers sweat. Does not know: who is asked, what comes of it.
Each must be refused, or followed within the server's limits, and nobody else may notice.
"""

import json
from typing import Any

from quill.protos import generation_pb2 as pb

_MB = 2**20
_NUMBER = {"type": "integer"}


def _nested(depth: int) -> str:
    return '{"items": ' * depth + "{}" + "}" * depth


def _wide(width: int, **more: Any) -> str:
    return json.dumps({"properties": {f"p{i}": _NUMBER for i in range(width)}, **more})


def _objects(number: int) -> list[Any]:
    return [{"properties": {f"k{i}": _NUMBER}} for i in range(number)]


def _patterns(number: int) -> str:
    named = {f"^[a-z]*{i}$": {"type": "string"} for i in range(number)}
    return json.dumps({"type": "object", "patternProperties": named})


def _ring(length: int) -> str:
    def link(i: int) -> dict[str, Any]:
        return {"properties": {"next": {"$ref": f"#/$defs/d{(i + 1) % length}"}}}

    return json.dumps({"$defs": {f"d{i}": link(i) for i in range(length)}, "$ref": "#/$defs/d0"})


def _long_lists() -> str:
    inner = {"type": "string", "minLength": 1000, "maxLength": 100_000}
    some = {"minItems": 10_000, "maxItems": 100_000}
    return json.dumps({"type": "array", "items": {"type": "array", "items": inner, **some}, **some})


def _rules(number: int) -> str:
    links = (f'r{i}: "x{i}" r{(i + 1) % number} | "y" r{i // 2}?' for i in range(number))
    return "\n".join((f"start: {' | '.join(f'r{i}' for i in range(number))}", *links))


SCHEMAS = {
    "100,000 levels": _nested(100_000),
    "6,000 levels": _nested(5_900),
    "a megabyte of white space": "{" + " " * _MB + "}",
    "a megabyte of choices": json.dumps({"enum": [f"value {i}" for i in range(_MB // 16)]}),
    "5,000 properties": _wide(5_000),
    "512 properties, none required": _wide(512, additionalProperties=False),
    "300 patterns of names": _patterns(300),
    "a reference to itself": '{"$ref": "#"}',
    "a ring of 500 references": _ring(500),
    "endless objects": '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}',
    "a document elsewhere": '{"$ref": "http://127.0.0.1:1/schema.json"}',
    "30 times 30 cases": json.dumps({"allOf": [{"anyOf": _objects(30)} for _ in range(30)]}),
    "400 cases of numbers": json.dumps(
        {"anyOf": [{"type": "number", "multipleOf": i + 0.001} for i in range(400)]}
    ),
    "lists of lists of long texts": _long_lists(),
    "400 hard patterns": json.dumps(
        {
            "properties": {
                f"p{i}": {"type": "string", "pattern": f"^(a|b)*a(a|b){{{i % 20}}}$"}
                for i in range(400)
            }
        }
    ),
}
REGEXES = {
    "30,000 brackets": "(" * 30_000 + ")" * 30_000,
    "a thousand times a thousand times a thousand": "((a{1,1000}){1,1000}){1,1000}",
    "what doubles its states": "(a|b)*a(a|b){20}",
    "fifty stars and two hundred dots": "(.*a){50}.{200}",
    "letters of all scripts": r"(\p{L}\p{N}){500}",
    "prose of 60,000 letters": "[A-Za-z ,.]{1,60000}",
}
LARKS = {
    "30,000 open brackets": "start: " + "(" * 30_000,
    "GBNF of 30,000 brackets": "root ::= " + "(" * 30_000,
    "1,000 rules": _rules(1_000),
    "an ambiguous sum": 'start: e\ne: e "+" e | e e | /[a-z ]+/',
    "GBNF of 20,000 letters": "root ::= " + " ".join(['"a"'] * 15_000),
}


def hostile_forms() -> dict[str, pb.Constraint]:
    """By what is wrong with them."""
    return {
        **{name: pb.Constraint(json_schema=text) for name, text in SCHEMAS.items()},
        **{name: pb.Constraint(regex=text) for name, text in REGEXES.items()},
        **{name: pb.Constraint(lark=text) for name, text in LARKS.items()},
    }
