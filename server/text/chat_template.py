"""Renders a conversation to one prompt, with the bundle's own chat template.

Knows: Jinja, in a sandbox with limits (server/text/template_limits.py): a template comes with
somebody's weights and can't be trusted. Does not know: tokens, requests, gRPC.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta

from quill.server.errors import InvalidFieldError, StartError
from quill.server.text.template_limits import (
    MAX_CHARACTERS,
    LimitedEnvironment,
    RenderLimitError,
    limited,
    rendering,
)
from quill.server.tools import TOOL_CALL_FORMATS, ToolCallFormat

_Messages = Sequence[Mapping[str, Any]]
_Tools = Sequence[Mapping[str, Any]] | None

# Templates render these to show how they write calls. Some require tools, and ids of nine
# characters.
_PROBE = "quill_probe"
_TOOL = {
    "type": "function",
    "function": {
        "name": "quill_tool",
        "description": "x",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
_PROBED: list[dict[str, Any]] = [
    {"role": "user", "content": "x"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "id": "quillprob",
                "function": {"name": _PROBE, "arguments": {"x": 1}},
            }
        ],
    },
]


class _TemplateRaisedError(Exception):
    """What a template raises with raise_exception()."""


def _raise(message: str) -> None:
    raise _TemplateRaisedError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own is for web pages: it would write "<" as an escape."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


class ChatTemplate:
    """A compiled template. Safe to use from several threads."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """`special`: the texts of tokens by the names that templates use, such as bos_token."""
        # As templates expect it: these are what Hugging Face's library sets.
        environment = LimitedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = limited("tojson", _tojson)
        try:
            parsed = environment.parse(source)
            self._template = environment.from_string(parsed, globals=dict(special))
            names = jinja2.meta.find_undeclared_variables(parsed)
        except (jinja2.TemplateError, RecursionError) as error:
            raise StartError(
                f"the bundle's chat template can't be read: {error}. Export the bundle with another"
            ) from error
        self.knows_tools = "tools" in names

    @functools.cached_property
    def _written_call(self) -> str:
        return self._try(_PROBED, [_TOOL])

    @functools.cached_property
    def takes_system(self) -> bool:
        """Whether a conversation may begin with a system message."""
        system = {"role": "system", "content": _PROBE}
        return _PROBE in self._try([system, *_PROBED[:1]])

    def _try(self, messages: _Messages, tools: _Tools = None) -> str:
        try:
            return self.render(messages, tools)
        except InvalidFieldError:
            return ""

    @property
    def writes_calls(self) -> bool:
        """Whether it renders the calls of a conversation."""
        return _PROBE in self._written_call

    @property
    def tool_call_format(self) -> ToolCallFormat | None:
        """How it writes calls, if that is known: it renders one, which is compared."""
        if not self.knows_tools:
            return None
        for each in TOOL_CALL_FORMATS:
            if f'{each.marker}{each.before}{each.head(_PROBE)}{{"x": 1}}' in self._written_call:
                return each
        return None

    def render(self, messages: _Messages, tools: _Tools = None) -> str:
        """The prompt."""
        parts, length = [], 0
        given = {"messages": messages, "tools": tools, "add_generation_prompt": True}
        try:
            with rendering():
                for part in self._template.generate(given):
                    parts.append(part)
                    length += len(part)
                    if length > MAX_CHARACTERS:
                        raise RenderLimitError(f"it makes more than {MAX_CHARACTERS} characters")
        # A template is a program: beside Jinja's own errors it may run into any of these.
        except (
            *(jinja2.TemplateError, _TemplateRaisedError, RenderLimitError, ArithmeticError),
            *(AttributeError, LookupError, RecursionError, TypeError, ValueError, MemoryError),
        ) as error:
            raise InvalidFieldError(
                "messages", f"can't be rendered with the model's chat template: {error}"
            ) from error
        return "".join(parts)
