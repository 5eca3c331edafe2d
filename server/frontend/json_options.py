"""Requests in the JSON that OpenAI's, vLLM's and llama.cpp's users know, as one table of fields.

Knows: their names and shapes, the options of server/fields.py. Does not know: HTTP, tensors.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quill.server import fields
from quill.server.errors import InvalidFieldError
from quill.server.frontend.json_values import (
    BOOLEAN,
    Json,
    JsonField,
    Kind,
    Unsupported,
    read_boolean,
    read_integer,
    read_integers,
    read_list,
    read_number,
    read_object,
    read_string,
    read_strings,
    type_of,
    wrong_type,
)
from quill.server.frontend.prompts import ROLES
from quill.server.frontend.spec import (
    ChatMessage,
    ConstraintSpec,
    Conversation,
    GenerateSpec,
    Prompt,
    ToolCall,
    ToolChoice,
    ToolSpec,
    choice_constraint,
    object_constraint,
)

_STRING: Json = {"type": "string"}
_OBJECT: Json = {"type": "object"}


# ------------------------------------------------------------------------- options of the table


def _read_bias(name: str, value: Any) -> dict[int, float]:
    """JSON's keys are strings."""
    bias = {}
    for token, number in read_object(name, value).items():
        if not (token.isascii() and token.isdecimal()) or len(token) > 9:
            raise InvalidFieldError(name, "has a key that isn't a token's id, such as \"42\"")
        bias[int(token)] = read_number(name, number)
    return bias


def _list_of(schema: Json) -> Json:
    return {"type": "array", "items": schema}


_READERS: dict[fields.Type, tuple[Json, Callable[[str, Any], Any]]] = {
    "integer": ({"type": "integer"}, read_integer),
    "number": ({"type": "number"}, read_number),
    "boolean": ({"type": "boolean"}, read_boolean),
    "strings": ({"anyOf": [_STRING, _list_of(_STRING)]}, read_strings),
    "integers": (_list_of({"type": "integer"}), read_integers),
    "bias": ({"type": "object", "additionalProperties": {"type": "number"}}, _read_bias),
}


def option_fields(field: fields.Field, *names: str) -> list[JsonField]:
    """An option of the table under its JSON names, or under others."""
    if field.choices is not None:
        kind = choice_kind(field.choices)
    else:
        schema, read = _READERS[field.type]
        adapt = field.from_json
        reader = read if adapt is None else lambda name, value: adapt(read(name, value))
        kind = Kind(schema, reader, None if field.is_list else field.parse)
    known = names or (field.json_name, *field.json_aliases)
    return [JsonField(name, kind, field.help, field.name) for name in known]


def choice_kind(choices: fields.Choices) -> Kind:
    known = choices.json or {value: value for value in choices.values}

    def read(name: str, value: Any) -> str:
        if not isinstance(value, bool | str) or value not in known:
            raise wrong_type(name, value, " or ".join(map(json.dumps, known)))
        return known[value]

    return Kind({"enum": list(known)}, read)


# --------------------------------------------------------------------------------- constraints


def _schema(name: str, value: Any) -> ConstraintSpec:
    """An object, or one that is written down already."""
    if not isinstance(value, dict | str):
        raise wrong_type(name, value, "a JSON Schema, as an object or as a string")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return ConstraintSpec("json_schema", text)


def _regex(name: str, value: Any) -> ConstraintSpec:
    return ConstraintSpec("regex", read_string(name, value))


def _grammar(name: str, value: Any) -> ConstraintSpec:
    return ConstraintSpec("lark", read_string(name, value))


def _choices(name: str, value: Any) -> ConstraintSpec:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise wrong_type(name, value, "a list of strings")
    return choice_constraint(name, value)


def _json_object(name: str, value: Any) -> ConstraintSpec:
    return object_constraint(name, read_boolean(name, value))


_STRUCTURED = {
    "json": _schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choices,
    "grammar": _grammar,
}


def _structured(name: str, value: Any) -> ConstraintSpec:
    given = {key: each for key, each in read_object(name, value).items() if each is not None}
    for key in ("structural_tag", "whitespace_pattern"):
        if key in given:
            raise InvalidFieldError(f"{name}.{key}", "isn't supported here. Leave it out")
    kinds = [key for key in _STRUCTURED if key in given]
    if len(kinds) != 1:
        rule = f"it must have one: {', '.join(_STRUCTURED)}"
        raise InvalidFieldError(name, f"has {len(kinds)} constraints; {rule}")
    (kind,) = kinds
    return _STRUCTURED[kind](f"{name}.{kind}", given[kind])


def _response_format(name: str, value: Any) -> ConstraintSpec | None:
    given = read_object(name, value)
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = given.get("schema")  # llama.cpp's way
        return object_constraint(name, True) if schema is None else _schema(name, schema)
    if kind == "json_schema":
        field = f"{name}.json_schema"
        schema = read_object(field, given.get("json_schema")).get("schema")
        if schema is None:
            raise InvalidFieldError(f"{field}.schema", "is missing: give a JSON Schema")
        return _schema(f"{field}.schema", schema)
    shown = kind[:40] if isinstance(kind, str) else type_of(kind)
    rule = "it must be text, json_object or json_schema"
    raise InvalidFieldError(f"{name}.type", f"is {shown!r}; {rule}")


_FORMAT: Json = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["text", "json_object", "json_schema"]},
        "json_schema": {"type": "object", "properties": {"schema": _OBJECT}},
    },
    "required": ["type"],
}
_ANY_SCHEMA: Json = {"anyOf": [_OBJECT, _STRING]}
_LARK = "a grammar in llguidance's Lark or llama.cpp's GBNF"
RESPONSE_FORMAT = JsonField(
    "response_format",
    Kind(_FORMAT, _response_format),
    "the answer is JSON, of any kind or by a schema",
    "constraint",
)
CONSTRAINTS = tuple(
    JsonField(name, Kind(schema, read), help, "constraint")
    for name, schema, read, help in (
        (
            "structured_outputs",
            _OBJECT,
            _structured,
            f"a constraint as in vLLM: one of {', '.join(_STRUCTURED)}",
        ),
        ("guided_json", _ANY_SCHEMA, _schema, "the answer is JSON by this schema"),
        ("guided_regex", _STRING, _regex, "a regular expression that matches all of the answer"),
        ("guided_choice", _list_of(_STRING), _choices, "the answer is one of these"),
        ("guided_grammar", _STRING, _grammar, _LARK),
        ("grammar", _STRING, _grammar, f"{_LARK}, as in llama.cpp"),
    )
)


# ------------------------------------------------------------------------ tools and conversations


def _tools(name: str, value: Any) -> list[ToolSpec]:
    return [_tool(f"{name}[{number}]", each) for number, each in enumerate(read_list(name, value))]


def _tool(name: str, value: Any) -> ToolSpec:
    field, function = f"{name}.function", _function(name, value)
    parameters = function.get("parameters")
    # Arguments always match the schema, so `strict` changes nothing.
    if function.get("strict") is not None:
        read_boolean(f"{field}.strict", function["strict"])
    return ToolSpec(
        field,
        read_string(f"{field}.name", function.get("name")),
        read_string(f"{field}.description", function.get("description") or ""),
        None if parameters is None else read_object(f"{field}.parameters", parameters),
    )


def _function(name: str, value: Any) -> Json:
    """The function of an object of the type function."""
    kind = read_object(name, value).get("type", "function")
    if kind != "function":
        shown = repr(kind[:40]) if isinstance(kind, str) else type_of(kind)
        raise InvalidFieldError(f"{name}.type", f"is {shown}; it must be 'function'")
    return read_object(f"{name}.function", value.get("function"))


def _tool_choice(name: str, value: Any) -> ToolChoice:
    if isinstance(value, str) and value in fields.TOOL_MODE.values:
        mode: Any = value
        return ToolChoice(mode)
    if not isinstance(value, dict):
        rule = '"none", "auto", "required" or an object that names a function'
        given = repr(value[:40]) if isinstance(value, str) else type_of(value)
        raise InvalidFieldError(name, f"is {given}; it must be {rule}")
    if value.get("type") == "allowed_tools":
        return _allowed_tools(f"{name}.allowed_tools", value.get("allowed_tools"))
    return ToolChoice("required", (_named_function(name, value),))


def _allowed_tools(name: str, value: Any) -> ToolChoice:
    mode = read_object(name, value).get("mode")
    if mode not in ("auto", "required"):
        raise InvalidFieldError(f"{name}.mode", 'must be "auto" or "required"')
    tools = read_list(f"{name}.tools", value.get("tools"))
    if not tools:
        raise InvalidFieldError(f"{name}.tools", "has no entries; it must have at least one")
    names = [_named_function(f"{name}.tools[{at}]", each) for at, each in enumerate(tools)]
    return ToolChoice(mode, tuple(names))


def _named_function(name: str, value: Any) -> str:
    return read_string(f"{name}.function.name", _function(name, value).get("name"))


_FUNCTION: Json = {
    "type": "object",
    "properties": {
        "name": _STRING,
        "description": _STRING,
        "parameters": _OBJECT,
        "strict": {"type": "boolean"},
    },
    "required": ["name"],
}
_TOOL: Json = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": ["function"]}, "function": _FUNCTION},
    "required": ["type", "function"],
}
_MODES: Json = {"anyOf": [{"type": "string", "enum": list(fields.TOOL_MODE.values)}, _OBJECT]}
TOOLS = (
    JsonField(
        "tools",
        Kind(_list_of(_TOOL), _tools),
        "functions that the model may call: the answer names one, and has its arguments",
        "tools",
    ),
    JsonField(
        "tool_choice",
        Kind(_MODES, _tool_choice),
        "none, auto (where the model's template knows tools), required, or a function by its name",
        "tool_choice",
    ),
    JsonField(
        "parallel_tool_calls",
        BOOLEAN,
        "whether an answer may have several calls, where the model's template writes several",
        "parallel_tool_calls",
    ),
)
_OTHER_ROLES = {"developer": "system", "function": "tool"}


def _messages(name: str, value: Any) -> Conversation:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise wrong_type(name, value, "a list of objects with role and content")
    return Conversation([_message(f"{name}[{at}]", each) for at, each in enumerate(value)])


def _message(name: str, value: Json) -> ChatMessage:
    role = read_string(f"{name}.role", value.get("role"))
    if value.get("function_call"):
        rule = "isn't supported here. Give tool_calls instead"
        raise InvalidFieldError(f"{name}.function_call", rule)
    calls = read_list(f"{name}.tool_calls", value.get("tool_calls") or [])
    # Users have names, too, which no template asks for.
    is_tool = role in ("tool", "function") and value.get("name") is not None
    return ChatMessage(
        role=_OTHER_ROLES.get(role, role),
        content=_content(f"{name}.content", value.get("content")),
        tool_calls=tuple(_call(f"{name}.tool_calls[{at}]", each) for at, each in enumerate(calls)),
        tool_call_id=read_string(f"{name}.tool_call_id", value.get("tool_call_id") or ""),
        name=read_string(f"{name}.name", value["name"]) if is_tool else "",
    )


def _call(name: str, value: Any) -> ToolCall:
    field, function = f"{name}.function", _function(name, value)
    id, arguments = value.get("id"), function.get("arguments")
    return ToolCall(
        field,
        "" if id is None else read_string(f"{name}.id", id),
        read_string(f"{field}.name", function.get("name")),
        "" if arguments is None else read_string(f"{field}.arguments", arguments),
    )


def _content(name: str, value: Any) -> str:
    """A text, or parts of one."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise wrong_type(name, value, "a string, or a list of parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            shown = kind[:40] if isinstance(kind, str) else type_of(part)
            rule = 'a model of text takes {"type": "text", "text": "…"} only'
            raise InvalidFieldError(name, f"has a part of type {shown!r}; {rule}")
        texts.append(part["text"])
    return "".join(texts)


_MESSAGE: Json = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "enum": [*ROLES, *_OTHER_ROLES]},
        "content": {"anyOf": [_STRING, _list_of(_OBJECT)]},
        "tool_calls": _list_of(_OBJECT),
        "tool_call_id": _STRING,
    },
    "required": ["role"],
}
CONVERSATION = Kind(_list_of(_MESSAGE), _messages)


# --------------------------------------------------------------------------------------- requests

# What HTTP and KServe share. Their own names of logprobs and echo they add themselves.
OPTIONS = (
    *(
        each
        for name, field in fields.GENERATE.items()
        if name not in ("logprobs", "echo")
        for each in option_fields(field)
    ),
    *CONSTRAINTS,
)
UNSUPPORTED = (
    Unsupported("use_beam_search", (False,), "Give num_beams instead"),
    Unsupported("logits_processors", ([],), "Leave it out"),
    Unsupported("bad_words", ([],), "Give logit_bias of -100 instead"),
    Unsupported("allowed_token_ids", ([],), "Give logit_bias instead"),
    Unsupported("truncate_prompt_tokens", (), "Cut the prompt yourself"),
)


def generate_spec(
    prompt: Prompt | None,
    values: Mapping[str, Any],
    known: Sequence[JsonField],
    defaults: Mapping[str, Any],
) -> GenerateSpec:
    """Of fields that were read by `read_fields`. `defaults`: options where a client gave none."""
    given: Json = {}
    names = {field.option: field.name for field in reversed(known) if field.option}
    for field in known:
        if not field.option or values.get(field.name) is None:
            continue
        if field.option == "constraint" and "constraint" in given:
            raise InvalidFieldError(field.name, "is set, and so is another constraint. Give one")
        given[field.option] = values[field.name]
        names[field.option] = field.name
    structured = {
        name: given.pop(name)
        for name in ("constraint", "tools", "tool_choice", "parallel_tool_calls")
        if name in given
    }
    return GenerateSpec(prompt=prompt, options={**defaults, **given}, names=names, **structured)
