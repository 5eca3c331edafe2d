"""Prompts become token ids: texts, lists of ids, and conversations rendered by a chat template.

Knows: tokenizers, chat templates, Hugging Face's names for messages, how long a prompt may be.
Does not know: wires, sampling options.

Strings that a client wrote are marked before rendering, so special tokens in them stay plain text.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quill.server.errors import InvalidFieldError, UnsupportedError
from quill.server.frontend.constraints import check_tool_name, read_object
from quill.server.frontend.served_model import ServedModel
from quill.server.frontend.spec import (
    ChatMessage,
    Conversation,
    Prompt,
    ToolCall,
    ToolSpec,
    ToolUse,
)
from quill.server.text.chat_template import ChatTemplate
from quill.server.text.tokenizer import Text
from quill.server.tools import PLAIN

MAX_MESSAGES = 1024
ROLES = ("system", "user", "assistant", "tool")
Json = dict[str, Any]
# For templates without a place for tools: a model can't choose a tool that it never sees.
_TOOL_LIST = """You can call these tools:
{tools}
To call one, answer with JSON and nothing else: {{"name": "its name", "arguments": {{...}}}}"""


class PromptReader:
    """Reads prompts for one model, or says which field is wrong and why."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    def read(
        self,
        prompt: Prompt | None,
        limits: tuple[int, int],
        max_tokens: int | None,
        tools: ToolUse | None = None,
        mask: int | None = None,
        missing: tuple[str, str] = ("input", "prompt, prompt_ids or messages"),
    ) -> tuple[int, ...]:
        """Token ids, as many as `limits` allow; `max_tokens` is the limit of the API key.

        `mask`: where the mask token stands in a text, it counts. `missing`: the field and the
        fields to give instead, for the error about no prompt.
        """
        if prompt is None:
            raise InvalidFieldError(missing[0], f"is missing: give {missing[1]}")
        field, value = prompt
        if isinstance(value, str):
            ids = self._encode_prompt(value, field, mask)
        elif isinstance(value, Conversation):
            ids = self._encode_messages(value.messages, field, tools)
        else:
            ids = list(value)
            self.check_ids(field, ids)
        least, most = limits
        if not least <= len(ids) <= most:
            rule = f"it must have from {least} to {most}"
            raise InvalidFieldError(field, f"has {len(ids)} tokens; {rule}")
        check_key_limit(len(ids), field, max_tokens)
        return tuple(ids)

    def check_ids(self, field: str, ids: Iterable[int]) -> None:
        vocab_size = self._served.vocab_size
        for token in ids:
            if not 0 <= token < vocab_size:
                rule = f"this model's are from 0 to {vocab_size - 1}"
                raise InvalidFieldError(field, f"has the token id {token}; {rule}")

    def encode(self, text: str, field: str, add_special_tokens: bool = True) -> list[int]:
        tokenizer = self._tokenizer(field)
        self._check_length(len(text), field, tokenizer)
        return tokenizer.encode(text, add_special_tokens)

    def _encode_prompt(self, text: str, field: str, mask: int | None) -> list[int]:
        if mask is not None:
            tokenizer = self._tokenizer(field)
            self._check_length(len(text), field, tokenizer)
            return tokenizer.encode_masked(text, mask)
        if self._served.is_translator and not text:
            return []  # special tokens alone are no source
        return self.encode(text, field)

    def _encode_messages(
        self, messages: Sequence[ChatMessage], field: str, tools: ToolUse | None
    ) -> list[int]:
        template, is_translator = self._served.template, self._served.is_translator
        if template is None or is_translator:
            reason = "translates" if is_translator else "has no chat template"
            raise UnsupportedError(
                f"this model {reason}, so it can't take messages. Give a prompt instead"
            )
        text = self._tokenizer(field)
        if not 1 <= len(messages) <= MAX_MESSAGES:
            rule = f"it must have from 1 to {MAX_MESSAGES}"
            raise InvalidFieldError(field, f"has {len(messages)} messages; {rule}")
        for message in messages:
            if message.role not in ROLES:
                given = f"has a message of the role {message.role[:40]!r}"
                raise InvalidFieldError(field, f"{given}; known are {', '.join(ROLES)}")
        self._check_length(sum(map(_num_characters, messages)), field, text)
        if tools is not None:
            self._check_length(sum(len(tool.description) for tool in tools.tools), "tools", text)
        return text.encode_rendered(_rendered(messages, tools, template, text.mark))

    def _tokenizer(self, field: str) -> Text:
        if self._served.text is None:
            raise UnsupportedError(
                f"this model has no tokenizer, so it can't take {field}. Give token ids instead"
            )
        return self._served.text

    def _check_length(self, num_characters: int, field: str, text: Text) -> None:
        """Before the tokenizer spends time on it, while which no other request runs."""
        context = self._served.context
        most = context * text.max_characters_per_token
        if num_characters > most:
            rule = f"for a context of {context} tokens at most {most} are read"
            raise InvalidFieldError(field, f"has {num_characters} characters; {rule}")


def check_key_limit(num_tokens: int, field: str, max_tokens: int | None) -> None:
    if max_tokens is not None and num_tokens > max_tokens:
        rule = f"at most {max_tokens} are allowed with this API key"
        raise InvalidFieldError(field, f"has {num_tokens} tokens; {rule}")


def _num_characters(message: ChatMessage) -> int:
    calls = sum(len(call.id) + len(call.name) + len(call.arguments) for call in message.tool_calls)
    return calls + len(message.content) + len(message.tool_call_id) + len(message.name)


def _rendered(
    messages: Sequence[ChatMessage],
    use: ToolUse | None,
    template: ChatTemplate,
    mark: Callable[[str], str],
) -> str:
    shown = [_marked(_message(each, template), mark) for each in messages]
    if use is None:
        return template.render(shown)
    tools = [_marked(_tool(each), mark) for each in use.tools]
    if template.knows_tools:
        return template.render(shown, tools)
    if use.mode != "none":
        shown = _with_tool_list(shown, tools, template.takes_system)
    return template.render(shown)


def _message(message: ChatMessage, template: ChatTemplate) -> Json:
    shown: Json = {"role": message.role, "content": message.content}
    if message.tool_call_id:
        shown["tool_call_id"] = message.tool_call_id
    if message.name:
        shown["name"] = message.name
    calls = [_call(each) for each in message.tool_calls]
    if calls and template.writes_calls:
        shown["tool_calls"] = calls
    elif calls:
        shown["content"] = "\n".join(filter(None, (message.content, *map(_written, calls))))
    return shown


def _call(call: ToolCall) -> Json:
    check_tool_name(f"{call.field}.name", call.name)
    arguments = read_object(f"{call.field}.arguments", call.arguments or "{}")
    shown: Json = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return {**shown, "id": call.id} if call.id else shown


def _written(call: Json) -> str:
    function = call["function"]
    return PLAIN.head(function["name"]) + _json(function["arguments"]) + "}"


def _tool(tool: ToolSpec) -> Json:
    empty: Json = {"type": "object", "properties": {}}
    parameters = empty if tool.parameters is None else tool.parameters
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _with_tool_list(
    messages: Sequence[Json], tools: Sequence[Json], takes_system: bool
) -> list[Json]:
    """At the end of the system message; without one, before the first message."""
    listed = _TOOL_LIST.format(tools="\n".join(_json(each["function"]) for each in tools))
    first = messages[0]
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{listed}"}, *messages[1:]]
    if takes_system:
        return [{"role": "system", "content": listed}, *messages]
    return [{**first, "content": f"{listed}\n\n{first['content']}"}, *messages[1:]]


def _marked(value: Any, mark: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, dict):
        return {mark(key): _marked(each, mark) for key, each in value.items()}
    return [_marked(each, mark) for each in value] if isinstance(value, list) else value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
