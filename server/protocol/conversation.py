"""A conversation as chat templates know it, with the tools that it may call and has called.

Knows: Hugging Face's names for all of it, what to do where a template has no place for it.
Does not know: token ids, limits of length.

What people write is marked, so that special tokens in it are plain text: tools and calls, too.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from quill.protos import generation_pb2 as pb
from quill.server.protocol.tool_fields import ToolUse, check_name, read_object
from quill.server.text.chat_template import ChatTemplate
from quill.server.tools import PLAIN, Tool

Mark = Callable[[str], str]
Json = dict[str, Any]
# For templates that know no tools. A model that never sees them couldn't choose.
_LISTED = """You can call these tools:
{tools}
To call one, answer with JSON and nothing else: {{"name": "its name", "arguments": {{...}}}}"""


def rendered(
    messages: Sequence[pb.Message], use: ToolUse | None, template: ChatTemplate, mark: Mark
) -> str:
    shown = [
        _marked(_message(f"messages[{number}]", each, template), mark)
        for number, each in enumerate(messages)
    ]
    if use is None:
        return template.render(shown)
    tools = [_marked(_tool(each), mark) for each in use.tools]
    if template.knows_tools:
        return template.render(shown, tools)
    if use.mode != "none":
        shown = _told(shown, tools, template.takes_system)
    return template.render(shown)


def num_characters(messages: Sequence[pb.Message]) -> int:
    texts = [text for each in messages for text in (each.content, each.tool_call_id, each.name)]
    calls = [call for each in messages for call in each.tool_calls]
    texts += [text for call in calls for text in (call.id, call.name, call.arguments)]
    return sum(map(len, texts))


def _message(field: str, message: pb.Message, template: ChatTemplate) -> Json:
    shown: Json = {"role": message.role, "content": message.content}
    for name in ("tool_call_id", "name"):
        if getattr(message, name):
            shown[name] = getattr(message, name)
    calls = [
        _call(f"{field}.tool_calls[{number}]", each)
        for number, each in enumerate(message.tool_calls)
    ]
    if calls and template.writes_calls:
        shown["tool_calls"] = calls
    elif calls:
        shown["content"] = "\n".join(filter(None, (message.content, *map(_written, calls))))
    return shown


def _call(field: str, call: pb.ToolCall) -> Json:
    check_name(f"{field}.name", call.name)
    arguments = read_object(f"{field}.arguments", call.arguments or "{}")
    shown: Json = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return {**shown, "id": call.id} if call.id else shown


def _written(call: Json) -> str:
    function = call["function"]
    return PLAIN.head(function["name"]) + _json(function["arguments"]) + "}"


def _tool(tool: Tool) -> Json:
    function: Json = {"name": tool.name, "description": tool.description}
    empty: Json = {"type": "object", "properties": {}}
    function["parameters"] = empty if tool.parameters is None else tool.parameters
    return {"type": "function", "function": function}


def _told(messages: Sequence[Json], tools: Sequence[Json], takes_system: bool) -> list[Json]:
    """By the system, at the end of its words; or by whoever speaks first, before."""
    listed = _LISTED.format(tools="\n".join(_json(each["function"]) for each in tools))
    first = messages[0]
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{listed}"}, *messages[1:]]
    if takes_system:
        return [{"role": "system", "content": listed}, *messages]
    return [{**first, "content": f"{listed}\n\n{first['content']}"}, *messages[1:]]


def _marked(value: Any, mark: Mark) -> Any:
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, dict):
        return {mark(key): _marked(each, mark) for key, each in value.items()}
    return [_marked(each, mark) for each in value] if isinstance(value, list) else value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
