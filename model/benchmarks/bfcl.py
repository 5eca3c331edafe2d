"""Compares tool calls with the Berkeley Function-Calling Leaderboard's answers (its AST match).

Knows: BFCL's types, rules of equality and possible answers, JSON Schema. Does not know: models.

As BFCL's checker does for Python: calls are compared by name and arguments in any order; strings
without spaces, case and some punctuation; an int is accepted where a float is asked for.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jsonschema

_TYPES: dict[str, type] = {
    **{"string": str, "integer": int, "float": float, "boolean": bool},
    **{"array": list, "tuple": list, "dict": dict, "any": str},
}
_SCHEMA_TYPES = {"float": "number", "dict": "object", "tuple": "array", "any": "string"}
_SCHEMA_KEYS = ("type", "description", "enum", "items", "properties", "required")
_IGNORED = re.compile(r"[ ,./\-_*^]")


class ToolCall(NamedTuple):
    name: str
    arguments: str  # JSON


def make_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """The function with a JSON Schema. Names with dots aren't OpenAI's: BFCL replaces them, too."""
    parameters = _schema(function["parameters"]) | {"type": "object"}
    described = function.get("description", "")
    return {"name": _name(function), "description": described, "parameters": parameters}


def _name(function: Mapping[str, Any]) -> str:
    return str(function["name"]).replace(".", "_")


def _schema(described: Mapping[str, Any]) -> dict[str, Any]:
    schema = {key: described[key] for key in _SCHEMA_KEYS if key in described}
    schema["type"] = _SCHEMA_TYPES.get(schema["type"], schema["type"])
    if "items" in schema:
        schema["items"] = _schema(schema["items"])
    if "properties" in schema:
        schema["properties"] = {name: _schema(each) for name, each in schema["properties"].items()}
    return schema


def are_valid(calls: Sequence[ToolCall], functions: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there are calls, all of functions that exist, with arguments as their schemas say."""
    schemas = {tool["name"]: tool["parameters"] for tool in map(make_tool, functions)}
    try:
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    except (ValueError, KeyError, jsonschema.ValidationError):
        return False
    return bool(calls)


def are_right(
    calls: Sequence[ToolCall],
    functions: Sequence[Mapping[str, Any]],
    answers: Sequence[Mapping[str, Any]],
) -> bool:
    """Each answer is found among the calls that no earlier answer was found in."""
    if len(calls) != len(answers):
        return False
    by_name = {function["name"]: function for function in functions}
    rest = list(calls)
    for answer in answers:
        ((name, allowed),) = answer.items()
        found = next((each for each in rest if _is_call(each, by_name[name], allowed)), None)
        if found is None:
            return False
        rest.remove(found)
    return True


def _is_call(call: ToolCall, function: Mapping[str, Any], allowed: Mapping[str, Any]) -> bool:
    try:
        given = json.loads(call.arguments)
    except ValueError:
        return False
    if call.name != _name(function) or not isinstance(given, dict):
        return False
    described = function["parameters"]["properties"]
    required = function["parameters"].get("required", ())
    optional = {name for name, values in allowed.items() if "" in values}
    return (
        {*required, *(allowed.keys() - optional)} <= given.keys()
        and given.keys() <= allowed.keys() & described.keys()
        and all(_is_value(value, allowed[name], described[name]) for name, value in given.items())
    )


def _is_value(value: Any, allowed: Sequence[Any], described: Mapping[str, Any]) -> bool:
    kind = _TYPES[described["type"]]
    inner = _TYPES[described["items"]["type"]] if kind is list else None
    if described["type"] == "float" and type(value) is int:
        value = float(value)
    if not _has_type(value, allowed, kind, inner):
        return False
    is_variable = _answer_type(allowed) not in (None, kind) or type(value) is not kind
    if is_variable:
        return value in allowed
    if kind is dict:
        return any(_is_dict(value, each) for each in allowed if each != "")
    if inner is dict:
        return any(_are_dicts(value, each) for each in allowed)
    if kind is str:
        return _plain(value) in [_plain(each) for each in allowed if isinstance(each, str)]
    if kind is list:
        return _plain_all(value) in [_plain_all(each) for each in allowed]
    return value in allowed


def _has_type(value: Any, allowed: Sequence[Any], kind: type, inner: type | None) -> bool:
    """A value may also have the type of the allowed ones: they may name a variable."""
    given = type(value)
    if given is not kind:
        return given is _answer_type(allowed)
    if inner is None:
        return True
    lists = [each for each in allowed if isinstance(each, list)]
    if len(lists) < len(allowed):
        return True  # "": the parameter may be left out
    return any(all(_has_type(item, each, inner, None) for item in value) for each in lists)


def _answer_type(allowed: Sequence[Any]) -> type | None:
    return next((type(each) for each in allowed if each != ""), None)


def _are_dicts(value: Sequence[Any], allowed: Sequence[Any]) -> bool:
    return len(value) == len(allowed) and all(
        _is_dict(each, values) for each, values in zip(value, allowed, strict=True)
    )


def _is_dict(value: Mapping[str, Any], allowed: Mapping[str, Any]) -> bool:
    missing = [name for name in allowed if name not in value and "" not in allowed[name]]
    return not missing and all(
        name in allowed and _plain(each) in _plain_all(allowed[name])
        for name, each in value.items()
    )


def _plain_all(values: Sequence[Any]) -> list[Any]:
    return [_plain(each) for each in values]


def _plain(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return _IGNORED.sub("", value).lower().replace("'", '"')
