"""Tools, choices among them and calls of them, in the shapes that OpenAI's users know.

Knows: their shapes, generation.proto's. Does not know: doors, templates, what is called.
"""

import json
import re
from typing import Any

from quill.protos import generation_pb2 as pb
from quill.server.errors import InvalidFieldError
from quill.server.service.json_fields import (
    BOOLEAN,
    OBJECT,
    STRING,
    Field,
    Json,
    Kind,
    a,
    refuse,
)

_MODES = {
    "auto": pb.TOOL_MODE_AUTO,
    "none": pb.TOOL_MODE_NONE,
    "required": pb.TOOL_MODE_REQUIRED,
}
_NESTED = re.compile(r"\b(tools|tool_calls)(\[\d+\])\.(?=name|description|parameters|arguments)")


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise refuse(name, value, "a list")
    return value


def _tools(name: str, value: Any) -> list[pb.Tool]:
    return [_tool(f"{name}[{number}]", each) for number, each in enumerate(_list(name, value))]


def _tool(name: str, value: Any) -> pb.Tool:
    function = _function(name, value)
    given = function.get("parameters")
    # Arguments always keep to the schema, so `strict` changes nothing.
    if function.get("strict") is not None:
        BOOLEAN.read(f"{name}.function.strict", function["strict"])
    parameters = None if given is None else OBJECT.read(f"{name}.function.parameters", given)
    return pb.Tool(
        name=STRING.read(f"{name}.function.name", function.get("name")),
        description=STRING.read(f"{name}.function.description", function.get("description") or ""),
        parameters="" if parameters is None else json.dumps(parameters, ensure_ascii=False),
    )


def _function(name: str, value: Any) -> Json:
    """What an object of the type function says of one."""
    kind = OBJECT.read(name, value).get("type", "function")
    if kind != "function":
        shown = repr(kind[:40]) if isinstance(kind, str) else a(kind)
        raise InvalidFieldError(f"{name}.type", f"is {shown}; it must be 'function'")
    return OBJECT.read(f"{name}.function", value.get("function"))  # type: ignore[no-any-return]


def _choice(name: str, value: Any) -> pb.ToolChoice:
    if isinstance(value, str) and value in _MODES:
        return pb.ToolChoice(mode=_MODES[value])
    if not isinstance(value, dict):
        rule = '"none", "auto", "required" or an object that names a function'
        given = repr(value[:40]) if isinstance(value, str) else a(value)
        raise InvalidFieldError(name, f"is {given}; it must be {rule}")
    if value.get("type") == "allowed_tools":
        return _allowed(f"{name}.allowed_tools", value.get("allowed_tools"))
    return pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED, names=[_named(name, value)])


def _allowed(name: str, value: Any) -> pb.ToolChoice:
    mode = OBJECT.read(name, value).get("mode")
    if mode not in ("auto", "required"):
        raise InvalidFieldError(f"{name}.mode", 'must be "auto" or "required"')
    tools = _list(f"{name}.tools", value.get("tools"))
    if not tools:
        raise InvalidFieldError(f"{name}.tools", "has no entries; it must have at least one")
    names = [_named(f"{name}.tools[{number}]", each) for number, each in enumerate(tools)]
    return pb.ToolChoice(mode=_MODES[mode], names=names)


def _named(name: str, value: Any) -> str:
    function = _function(name, value)
    return str(STRING.read(f"{name}.function.name", function.get("name")))


def read_calls(name: str, value: Any) -> list[pb.ToolCall]:
    """Those of a message that an assistant said."""
    return [_call(f"{name}[{number}]", each) for number, each in enumerate(_list(name, value))]


def _call(name: str, value: Any) -> pb.ToolCall:
    function = _function(name, value)
    id, arguments = value.get("id"), function.get("arguments")
    return pb.ToolCall(
        id="" if id is None else STRING.read(f"{name}.id", id),
        name=STRING.read(f"{name}.function.name", function.get("name")),
        arguments="" if arguments is None else STRING.read(f"{name}.function.arguments", arguments),
    )


def as_nested(error: InvalidFieldError) -> InvalidFieldError:
    """What generation.proto has in a tool or a call, these shapes have in its function."""
    field = _NESTED.sub(r"\1\2.function.", error.field)
    return error if field == error.field else InvalidFieldError(field, error.reason)


_FUNCTION: Json = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "description": {"type": "string"},
        "parameters": {"type": "object"},
        "strict": {"type": "boolean"},
    },
    "required": ["name"],
}
_TOOL: Json = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": ["function"]}, "function": _FUNCTION},
    "required": ["type", "function"],
}
_CHOICE: Json = {"anyOf": [{"type": "string", "enum": list(_MODES)}, {"type": "object"}]}
TOOLS = (
    Field(
        "tools",
        Kind({"type": "array", "items": _TOOL}, _tools),
        "functions that the model may call: the answer says which, and with which arguments",
        "tools",
    ),
    Field(
        "tool_choice",
        Kind(_CHOICE, _choice),
        "none, auto (where the model's template knows tools), required, or a function by its name",
        "tool_choice",
    ),
    Field(
        "parallel_tool_calls",
        BOOLEAN,
        "whether an answer may have several calls, where the model's template writes several",
        "parallel_tool_calls",
    ),
)
