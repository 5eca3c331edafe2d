"""Structured output and tools: what they go with, and the grammar that a request asks for.

Knows: the rules for constraints and tools, how a model writes calls.
Does not know: wires, how a grammar is compiled, cached and followed.

A schema is parsed once: HTTP's with its body; gRPC's for the chat template, which shows it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quill.server.errors import InvalidFieldError, UnsupportedError
from quill.server.frontend.json_values import JsonError, parse_json
from quill.server.frontend.served_model import ServedModel
from quill.server.frontend.spec import Conversation, GenerateSpec, ToolChoice, ToolSpec, ToolUse
from quill.server.grammar.constraint_source import ToolSchema, marker_id, tool_constraint
from quill.server.grammar.json_schema import MAX_DEPTH, nested
from quill.server.request import MAX_CONSTRAINT_BYTES, Constraint
from quill.server.text.chat_template import ChatTemplate
from quill.server.tools import PLAIN, ToolCallFormat

MAX_TOOLS = 128
_NAME = re.compile("[a-zA-Z0-9_-]{1,64}")


def read_constraint(
    spec: GenerateSpec, options: Mapping[str, Any], served: ServedModel
) -> Constraint | None:
    if spec.constraint is None:
        return None
    _check_can_constrain("constraint", options, served)
    return Constraint(*spec.constraint)


def _check_can_constrain(field: str, options: Mapping[str, Any], served: ServedModel) -> None:
    if served.grammars is None:
        raise UnsupportedError(
            "this model can't follow a constraint: it has no tokenizer, no end-of-text token, or "
            f"tokens that aren't bytes. Leave out {field}"
        )
    if (options["num_beams"] or 1) > 1:
        rule = "is set, and beam search uses the model's own distribution"
        raise InvalidFieldError(field, f"{rule}. Leave out one of it and num_beams")
    if options["ignore_eos"]:
        rule = f"is set, and what {field} asks for has to end"
        raise InvalidFieldError("ignore_eos", f"{rule}. Leave out one of them")


def read_tools(
    spec: GenerateSpec, options: Mapping[str, Any], served: ServedModel
) -> ToolUse | None:
    choice = spec.tool_choice
    if not spec.tools:
        if choice.mode == "required" or choice.names:
            raise InvalidFieldError("tool_choice", "asks for a call, and there are no tools")
        return None
    if spec.prompt is None or not isinstance(spec.prompt.value, Conversation):
        raise InvalidFieldError("tools", "are given, and the input isn't messages. Give these")
    if choice.mode != "none" and served.template is not None:
        _check_can_constrain("tools", options, served)
        if spec.constraint is not None:
            rule = 'tools may be called. Leave out one of them, or set tool_choice to "none"'
            raise InvalidFieldError("constraint", f"is set, and {rule}")
    tools = _tools(spec.tools)
    names = _called_names(choice, tools)
    if choice.mode == "none" or served.template is None or served.text is None:
        return ToolUse(tools=tools, mode="none")  # without a template the messages are rejected
    format_ = _tool_call_format(choice, served.template)
    called = [
        ToolSchema(f"{each.field}.parameters", each.name, _written(each.parameters))
        for each in spec.tools
        if each.name in names
    ]
    is_named = choice.mode == "required" and len(choice.names) == 1
    several = spec.parallel_tool_calls and not is_named
    return ToolUse(
        tools=tools,
        mode=choice.mode,
        names=tuple(each.name for each in called),
        tool_call_format=format_,
        marker_id=marker_id(format_, served.text.split),
        constraint=tool_constraint(
            *(called, format_, served.text.split),
            may_speak=choice.mode == "auto",
            several=several,
        ),
    )


def _tool_call_format(choice: ToolChoice, template: ChatTemplate) -> ToolCallFormat:
    if template.tool_call_format is not None:
        return template.tool_call_format
    if choice.mode == "auto":
        unknown = "writes calls in a way that isn't known here"
        reason = unknown if template.knows_tools else "knows no tools"
        rule = "Ask for a call (required, or a tool's name), or for none"
        given = f"is auto, and the model's chat template {reason}"
        raise InvalidFieldError("tool_choice", f"{given}. {rule}")
    return PLAIN


def _tools(specs: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
    if len(specs) > MAX_TOOLS:
        rule = f"at most {MAX_TOOLS} are allowed"
        raise InvalidFieldError("tools", f"has {len(specs)} entries; {rule}")
    num_bytes = sum(len(_written(each.parameters).encode()) for each in specs)
    if num_bytes > MAX_CONSTRAINT_BYTES:
        rule = f"they may have {MAX_CONSTRAINT_BYTES} at most together"
        raise InvalidFieldError("tools", f"have {num_bytes} bytes of parameters; {rule}")
    names = set[str]()
    for each in specs:
        check_tool_name(f"{each.field}.name", each.name)
        if each.name in names:
            raise InvalidFieldError(f"{each.field}.name", "is another tool's, too")
        names.add(each.name)
    return tuple(map(_parsed, specs))


def _written(parameters: str | dict[str, Any] | None) -> str:
    if isinstance(parameters, dict):
        return json.dumps(parameters, ensure_ascii=False)
    return parameters or ""


def _parsed(spec: ToolSpec) -> ToolSpec:
    if not spec.parameters and not isinstance(spec.parameters, dict):
        return spec._replace(parameters=None)
    parameters = read_object(f"{spec.field}.parameters", spec.parameters)
    if parameters.get("type", "object") != "object":
        rule = 'arguments are an object: its "type" must be "object"'
        raise InvalidFieldError(
            f"{spec.field}.parameters", f"is a schema of something else; {rule}"
        )
    return spec._replace(parameters=parameters)


def _called_names(choice: ToolChoice, tools: Sequence[ToolSpec]) -> set[str]:
    known = {tool.name for tool in tools}
    if not known.issuperset(choice.names):
        raise InvalidFieldError("tool_choice.names", "has a name that none of the tools has")
    return set(choice.names) or known


def check_tool_name(field: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        rule = "it must have from 1 to 64 letters, digits, underscores and hyphens"
        raise InvalidFieldError(field, f"isn't a tool's name; {rule}")


def read_object(field: str, given: str | dict[str, Any]) -> dict[str, Any]:
    """A JSON object, parsed if it isn't, and not too deep."""
    try:
        value = parse_json(given.encode()) if isinstance(given, str) else given
    except JsonError as error:
        raise InvalidFieldError(field, str(error)) from None
    if not isinstance(value, dict):
        raise InvalidFieldError(field, "isn't a JSON object")
    if any(depth > MAX_DEPTH for depth, _ in nested(value)):
        rule = f"has more than {MAX_DEPTH} objects and lists within one another"
        raise InvalidFieldError(field, rule)
    return value
