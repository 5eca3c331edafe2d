"""A conversation becomes one text, by the bundle's own template.

Knows: Jinja, in a sandbox: a template comes with somebody's weights and may be anybody's.
Does not know: tokens, requests, gRPC.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quill.server.errors import InvalidFieldError, StartError
from quill.server.tools import CALL_FORMS, CallForm

MAX_RENDERED = 4 * 2**20  # characters
# What templates are asked to write, to see how they do it. Some want tools, and ids of nine
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


class _ComplaintError(Exception):
    """What a template says with raise_exception()."""


def _raise(message: str) -> None:
    raise _ComplaintError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own is for web pages: it would write "<" as an escape."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class ChatTemplate:
    """A compiled template. Safe to use from several threads."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """`special`: the texts of tokens by the names that templates use, such as bos_token."""
        # As templates expect it: these are what Hugging Face's library sets.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = _tojson
        try:
            self._template = environment.from_string(source, globals=dict(special))
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
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
        """Whether a conversation may begin with words of the system."""
        system = {"role": "system", "content": _PROBE}
        return _PROBE in self._try([system, *_PROBED[:1]])

    def _try(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        try:
            return self.render(messages, tools)
        except InvalidFieldError:
            return ""

    @property
    def writes_calls(self) -> bool:
        """Whether it shows what was called in a conversation."""
        return _PROBE in self._written_call

    @property
    def call_form(self) -> CallForm | None:
        """How it writes calls, if that is known: found out by having it write one."""
        if not self.knows_tools:
            return None
        for form in CALL_FORMS:
            call = f'{form.marker}{form.before}{form.head(_PROBE)}{{"x": 1}}'
            if call in self._written_call:
                return form
        return None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text that the answer continues."""
        pieces, length = [], 0
        given = {"messages": messages, "tools": tools, "add_generation_prompt": True}
        try:
            for piece in self._template.generate(given):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_RENDERED:
                    raise _ComplaintError(f"it makes more than {MAX_RENDERED} characters")
        # A template is a program: beside Jinja's own errors it may run into any of these.
        except (
            *(jinja2.TemplateError, _ComplaintError, ArithmeticError, AttributeError),
            *(LookupError, RecursionError, TypeError, ValueError, MemoryError),
        ) as error:
            raise InvalidFieldError(
                "messages", f"can't be rendered with the model's chat template: {error}"
            ) from error
        return "".join(pieces)
