"""Constraints for structured output: usual ones with their prompts, and adversarial ones.

Knows: generation.proto, fifty JSON schemas and unsupported ones. Does not know: models, grammars.
"""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

from quill.protos import generation_pb2 as pb

_FILE = json.loads(Path(__file__).with_name("schemas.json").read_text(encoding="utf-8"))
SCHEMAS: dict[str, dict[str, Any]] = _FILE["kept"]  # by what they describe
REFUSED: dict[str, Any] = _FILE["refused"]  # by what is unsupported

REGEXES = {
    "a date in October": r"2026-10-(0[1-9]|[12]\d|3[01])",
    "a telephone number": r"\+\d{2} \d{3} \d{4,7}",
    "a short sentence": r"[A-Z][a-z ,]{3,60}[.!?]",
    "a colour for a page": "#[0-9a-f]{6}",
}
CHOICES = (
    ("yes", "no"),
    ("positive", "negative", "neutral"),
    tuple(f"section {number}" for number in range(1, 41)),
)
GRAMMARS = {
    "a sum": 'start: number (("+" | "-") number){1,4}\nnumber: /[1-9][0-9]{0,2}/',
    "a bracketed list": 'start: "(" item (", " item){0,3} ")"\nitem: /[a-z]{1,8}/ | start',
    "a move in chess, as GBNF": "root ::= piece? [a-h] [1-8]\npiece ::= [NBRQK]",
}


class WantedConstraint(NamedTuple):
    what: str  # what the prompt asks for
    constraint: pb.Constraint


def wanted_schema(name: str) -> WantedConstraint:
    text = json.dumps(SCHEMAS[name], ensure_ascii=False)
    return WantedConstraint(f"{name} as JSON", pb.Constraint(json_schema=text))


def sample_constraint(chance: random.Random) -> WantedConstraint:
    """Half of them are schemas, the most usual kind."""
    match chance.choice(("schema", "schema", "schema", "schema", "regex", "choice", "any", "lark")):
        case "schema":
            return wanted_schema(chance.choice(list(SCHEMAS)))
        case "regex":
            what = chance.choice(list(REGEXES))
            return WantedConstraint(what, pb.Constraint(regex=REGEXES[what]))
        case "choice":
            some = chance.choice(CHOICES)
            return WantedConstraint("your opinion", pb.Constraint(choice=pb.Choice(choices=some)))
        case "lark":
            what = chance.choice(list(GRAMMARS))
            return WantedConstraint(what, pb.Constraint(lark=GRAMMARS[what]))
    return WantedConstraint("any object as JSON", pb.Constraint(json_object=True))


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


HARD_SCHEMAS = {
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
HARD_REGEXES = {
    "30,000 brackets": "(" * 30_000 + ")" * 30_000,
    "a thousand times a thousand times a thousand": "((a{1,1000}){1,1000}){1,1000}",
    "what doubles its states": "(a|b)*a(a|b){20}",
    "fifty stars and two hundred dots": "(.*a){50}.{200}",
    "letters of all scripts": r"(\p{L}\p{N}){500}",
    "prose of 60,000 letters": "[A-Za-z ,.]{1,60000}",
}
HARD_GRAMMARS = {
    "30,000 open brackets": "start: " + "(" * 30_000,
    "GBNF of 30,000 brackets": "root ::= " + "(" * 30_000,
    "1,000 rules": _rules(1_000),
    "an ambiguous sum": 'start: e\ne: e "+" e | e e | /[a-z ]+/',
    "GBNF of 20,000 letters": "root ::= " + " ".join(['"a"'] * 15_000),
}


def adversarial_constraints() -> dict[str, pb.Constraint]:
    """Too deep, too wide, too long or endless, by what is wrong with each.

    A server must reject each, or follow it within its limits, and must not delay other requests.
    """
    return {
        **{name: pb.Constraint(json_schema=text) for name, text in HARD_SCHEMAS.items()},
        **{name: pb.Constraint(regex=text) for name, text in HARD_REGEXES.items()},
        **{name: pb.Constraint(lark=text) for name, text in HARD_GRAMMARS.items()},
    }
