"""The forms that answers keep to, by the names that OpenAI's, vLLM's and llama.cpp's users know.

Knows: their names and shapes, generation.proto's. Does not know: doors, grammars.
"""

import json
from typing import Any

from quill.protos import generation_pb2 as pb
from quill.server.errors import InvalidFieldError
from quill.server.service.json_fields import BOOLEAN, OBJECT, STRING, Field, Json, Kind, a, refuse

_SCHEMA: Json = {"anyOf": [{"type": "object"}, {"type": "string"}]}
_CHOICES: Json = {"type": "array", "items": {"type": "string"}}


def _schema(name: str, value: Any) -> pb.Constraint:
    """An object, or one that is written down already."""
    if not isinstance(value, dict | str):
        raise refuse(name, value, "a JSON Schema, as an object or as a string")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return pb.Constraint(json_schema=text)


def _regex(name: str, value: Any) -> pb.Constraint:
    return pb.Constraint(regex=STRING.read(name, value))


def _choice(name: str, value: Any) -> pb.Constraint:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise refuse(name, value, "a list of strings")
    return pb.Constraint(choice=pb.Choice(choices=value))


def _grammar(name: str, value: Any) -> pb.Constraint:
    return pb.Constraint(lark=STRING.read(name, value))


def _json_object(name: str, value: Any) -> pb.Constraint:
    return pb.Constraint(json_object=BOOLEAN.read(name, value))


_STRUCTURED = {
    "json": _schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
_UNSUPPORTED = ("structural_tag", "whitespace_pattern")


def _structured(name: str, value: Any) -> pb.Constraint:
    given = {key: each for key, each in OBJECT.read(name, value).items() if each is not None}
    for key in _UNSUPPORTED:
        if key in given:
            raise InvalidFieldError(f"{name}.{key}", "isn't supported here. Leave it out")
    kinds = [key for key in _STRUCTURED if key in given]
    if len(kinds) != 1:
        rule = f"it must have one: {', '.join(_STRUCTURED)}"
        raise InvalidFieldError(name, f"has {len(kinds)} forms; {rule}")
    (kind,) = kinds
    return _STRUCTURED[kind](f"{name}.{kind}", given[kind])


def _response_format(name: str, value: Any) -> pb.Constraint | None:
    given = OBJECT.read(name, value)
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = given.get("schema")  # llama.cpp's way
        return pb.Constraint(json_object=True) if schema is None else _schema(name, schema)
    if kind == "json_schema":
        field = f"{name}.json_schema"
        schema = OBJECT.read(field, given.get("json_schema")).get("schema")
        if schema is None:
            raise InvalidFieldError(f"{field}.schema", "is missing: give a JSON Schema")
        return _schema(f"{field}.schema", schema)
    shown = kind[:40] if isinstance(kind, str) else a(kind)
    rule = "it must be text, json_object or json_schema"
    raise InvalidFieldError(f"{name}.type", f"is {shown!r}; {rule}")


_FORMAT: Json = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["text", "json_object", "json_schema"]},
        "json_schema": {"type": "object", "properties": {"schema": {"type": "object"}}},
    },
    "required": ["type"],
}
_INTO = "constraint"
RESPONSE_FORMAT = Field(
    "response_format",
    Kind(_FORMAT, _response_format),
    "the answer is JSON, of any kind or by a schema",
    _INTO,
)
CONSTRAINTS = (
    Field(
        "structured_outputs",
        Kind({"type": "object"}, _structured),
        f"the answer's form, as in vLLM: one of {', '.join(_STRUCTURED)}",
        _INTO,
    ),
    Field("guided_json", Kind(_SCHEMA, _schema), "the answer is JSON by this schema", _INTO),
    Field(
        "guided_regex",
        Kind({"type": "string"}, _regex),
        "a regular expression that matches all of the answer",
        _INTO,
    ),
    Field("guided_choice", Kind(_CHOICES, _choice), "the answer is one of these", _INTO),
    Field(
        "guided_grammar",
        Kind({"type": "string"}, _grammar),
        "a grammar in llguidance's Lark or llama.cpp's GBNF",
        _INTO,
    ),
    Field("grammar", Kind({"type": "string"}, _grammar), "the same, as in llama.cpp", _INTO),
)
