"""Tools that an answer may call, read from a message.

Knows: protobuf, what tools go with, how the model writes calls. Does not know: grammars.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quill.protos import generation_pb2 as pb
from quill.server.errors import InvalidFieldError
from quill.server.grammar.constraint_source import (
    MAX_BYTES,
    Constraint,
    ToolSchema,
    tool_constraint,
)
from quill.server.grammar.json_schema import MAX_DEPTH, nested
from quill.server.protocol.constraint_fields import check_can_constrain
from quill.server.protocol.served_model import ServedModel
from quill.server.text.chat_template import ChatTemplate
from quill.server.text.tokenizer import Text
from quill.server.tools import PLAIN, Tool, ToolCallFormat

Mode = Literal["auto", "none", "required"]
_MODES: dict[int, Mode] = {
    pb.TOOL_MODE_UNSPECIFIED: "auto",
    pb.TOOL_MODE_AUTO: "auto",
    pb.TOOL_MODE_NONE: "none",
    pb.TOOL_MODE_REQUIRED: "required",
}
MAX_TOOLS = 128
_NAME = re.compile("[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """What the model is shown, and how what it calls is read from its answer."""

    tools: tuple[Tool, ...]
    mode: Mode
    tool_call_format: ToolCallFormat = PLAIN
    marker_id: int | None = None  # of the form's marker, if that is a special token
    constraint: Constraint | None = None  # None: nothing is called


def read_tools(message: pb.GenerateRequest, served: ServedModel) -> ToolUse | None:
    mode = _mode(message.tool_choice)
    if not message.tools:
        if mode == "required" or message.tool_choice.names:
            raise InvalidFieldError("tool_choice", "asks for a call, and there are no tools")
        return None
    if message.WhichOneof("input") != "messages":
        raise InvalidFieldError("tools", "are given, and the input isn't messages. Give these")
    tools = _tools(message.tools)
    names = _names(message.tool_choice, tools)
    if mode == "none" or served.template is None or served.text is None:  # refused elsewhere
        return ToolUse(tools=tools, mode="none")
    check_can_constrain("tools", message, served)
    if message.HasField("constraint"):
        rule = 'tools may be called. Leave out one of them, or set tool_choice to "none"'
        raise InvalidFieldError("constraint", f"is set, and {rule}")
    called = [
        ToolSchema(f"tools[{number}].parameters", tool.name, tool.parameters)
        for number, tool in enumerate(message.tools)
        if tool.name in names
    ]
    parallel = message.parallel_tool_calls or not message.HasField("parallel_tool_calls")
    is_named = mode == "required" and len(message.tool_choice.names) == 1
    tool_call_format = _tool_call_format(mode, served.template)
    constraint = tool_constraint(
        called, tool_call_format, may_speak=mode == "auto", several=parallel and not is_named
    )
    marker_id = _marker_id(tool_call_format, served.text)
    return ToolUse(
        tools=tools,
        mode=mode,
        tool_call_format=tool_call_format,
        marker_id=marker_id,
        constraint=constraint,
    )


def _mode(choice: pb.ToolChoice) -> Mode:
    if choice.mode not in _MODES:
        raise InvalidFieldError("tool_choice.mode", f"is {choice.mode}; there is no such")
    return _MODES[choice.mode]


def _tool_call_format(mode: Mode, template: ChatTemplate) -> ToolCallFormat:
    if template.tool_call_format is not None:
        return template.tool_call_format
    if mode == "auto":
        unknown = "writes calls in a way that isn't known here"
        reason = unknown if template.knows_tools else "knows no tools"
        rule = "Ask for a call (required, or a tool's name), or for none"
        given = f"is auto, and the model's chat template {reason}"
        raise InvalidFieldError("tool_choice", f"{given}. {rule}")
    return PLAIN


def _marker_id(form: ToolCallFormat, text: Text) -> int | None:
    first = next(iter(text.split(form.marker)), "")
    return first if isinstance(first, int) else None


def _tools(messages: Sequence[pb.Tool]) -> tuple[Tool, ...]:
    if len(messages) > MAX_TOOLS:
        rule = f"at most {MAX_TOOLS} are allowed"
        raise InvalidFieldError("tools", f"has {len(messages)} entries; {rule}")
    num_bytes = sum(len(each.parameters.encode()) for each in messages)
    if num_bytes > MAX_BYTES:
        rule = f"they may have {MAX_BYTES} at most together"
        raise InvalidFieldError("tools", f"have {num_bytes} bytes of parameters; {rule}")
    names = set[str]()
    for number, each in enumerate(messages):
        check_name(f"tools[{number}].name", each.name)
        if each.name in names:
            raise InvalidFieldError(f"tools[{number}].name", "is another tool's, too")
        names.add(each.name)
    return tuple(_tool(f"tools[{number}]", each) for number, each in enumerate(messages))


def _tool(field: str, message: pb.Tool) -> Tool:
    if not message.parameters:
        return Tool(message.name, message.description, None)
    parameters = read_object(f"{field}.parameters", message.parameters)
    if parameters.get("type", "object") != "object":
        rule = 'arguments are an object: its "type" must be "object"'
        raise InvalidFieldError(f"{field}.parameters", f"is a schema of something else; {rule}")
    return Tool(message.name, message.description, parameters)


def _names(choice: pb.ToolChoice, tools: Sequence[Tool]) -> set[str]:
    """Of those that may be called."""
    known = {tool.name for tool in tools}
    if not known.issuperset(choice.names):
        raise InvalidFieldError("tool_choice.names", "has a name that none of the tools has")
    return set(choice.names) or known


def check_name(field: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        rule = "it must have from 1 to 64 letters, digits, underscores and hyphens"
        raise InvalidFieldError(field, f"isn't a tool's name; {rule}")


def read_object(field: str, text: str) -> dict[str, Any]:
    """JSON that isn't too deep."""
    too_deep = f"has more than {MAX_DEPTH} objects and lists within one another"
    try:
        value = json.loads(text)
        # Python also reads NaN, and halves of surrogate pairs.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise InvalidFieldError(field, too_deep) from None
    except UnicodeEncodeError:
        raise InvalidFieldError(field, "has half of a surrogate pair") from None
    except ValueError as error:
        raise InvalidFieldError(field, f"isn't JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidFieldError(field, "isn't a JSON object")
    if any(depth > MAX_DEPTH for depth, _ in nested(value)):
        raise InvalidFieldError(field, too_deep)
    return value
