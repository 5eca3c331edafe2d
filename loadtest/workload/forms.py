"""Forms that the crowd's answers keep to, each with what is asked for.

Knows: the wire, fifty JSON schemas and those that are refused. Does not know: models, grammars.
"""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

from quill.protos import generation_pb2 as pb

_FILE = json.loads(Path(__file__).with_name("schemas.json").read_text(encoding="utf-8"))
SCHEMAS: dict[str, dict[str, Any]] = _FILE["kept"]  # by what they describe
REFUSED: dict[str, Any] = _FILE["refused"]  # by what can't be kept to

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


class AskedForm(NamedTuple):
    what: str  # is wanted, for a prompt
    constraint: pb.Constraint


def asked_schema(name: str) -> AskedForm:
    text = json.dumps(SCHEMAS[name], ensure_ascii=False)
    return AskedForm(f"{name} as JSON", pb.Constraint(json_schema=text))


def draw_form(chance: random.Random) -> AskedForm:
    """Half of them are schemas, which is what most people ask for."""
    match chance.choice(("schema", "schema", "schema", "schema", "regex", "choice", "any", "lark")):
        case "schema":
            return asked_schema(chance.choice(list(SCHEMAS)))
        case "regex":
            what = chance.choice(list(REGEXES))
            return AskedForm(what, pb.Constraint(regex=REGEXES[what]))
        case "choice":
            some = chance.choice(CHOICES)
            return AskedForm("your opinion", pb.Constraint(choice=pb.Choice(choices=some)))
        case "lark":
            what = chance.choice(list(GRAMMARS))
            return AskedForm(what, pb.Constraint(lark=GRAMMARS[what]))
    return AskedForm("any object as JSON", pb.Constraint(json_object=True))
