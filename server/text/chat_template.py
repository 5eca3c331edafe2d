"""A conversation becomes one text, by the bundle's own template.

Knows: Jinja, in a sandbox: a template comes with somebody's weights and may be anybody's.
Does not know: tokens, requests, gRPC.
"""

from collections.abc import Mapping, Sequence

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quill.server.errors import InvalidFieldError, StartError

MAX_RENDERED = 4 * 2**20  # characters


class _ComplaintError(Exception):
    """What a template says with raise_exception()."""


def _raise(message: str) -> None:
    raise _ComplaintError(message)


class ChatTemplate:
    """A compiled template. Safe to use from several threads."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """`special`: the texts of tokens by the names that templates use, such as bos_token."""
        # As templates expect it: these are what Hugging Face's library sets.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(source, globals=dict(special))
        except (jinja2.TemplateError, RecursionError) as error:
            raise StartError(
                f"the bundle's chat template can't be read: {error}. Export the bundle with another"
            ) from error

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text that the answer continues."""
        pieces, length = [], 0
        try:
            for piece in self._template.generate(messages=messages, add_generation_prompt=True):
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
