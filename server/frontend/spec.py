"""What a client asks for, as plain values: every frontend makes these, and the reader checks them.

Knows: texts, token ids, options by their names in server/fields.py. Does not know: wires, models.

Each value carries the name that the client wrote it under, so an error names the client's field.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from quill.server.errors import InvalidFieldError
from quill.server.request import Constraint, Request
from quill.server.tools import PLAIN, ToolCallFormat

ToolMode = Literal["auto", "none", "required"]
MAX_CHOICES = 1024


class ToolCall(NamedTuple):
    """A call in a conversation. `field`: where its name and arguments stand in the request."""

    field: str
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class ChatMessage:
    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


class Conversation(NamedTuple):
    messages: Sequence[ChatMessage]


class Prompt(NamedTuple):
    """A text, token ids or a conversation, and the name of the field it came in."""

    field: str
    value: str | Sequence[int] | Conversation


class ToolSpec(NamedTuple):
    """A tool as the client sent it: its parameters are JSON, written down or parsed already."""

    field: str
    name: str
    description: str
    parameters: str | dict[str, Any] | None


class ToolChoice(NamedTuple):
    mode: ToolMode = "auto"
    names: Sequence[str] = ()


class ConstraintSpec(NamedTuple):
    """What an answer must match, as a request's Constraint has it."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "lark"]
    text: str


def choice_constraint(field: str, choices: Sequence[str]) -> ConstraintSpec:
    if not 1 <= len(choices) <= MAX_CHOICES:
        rule = f"it must have from 1 to {MAX_CHOICES}"
        raise InvalidFieldError(field, f"has {len(choices)} entries; {rule}")
    if not all(choices):
        raise InvalidFieldError(field, "has an empty entry; each must have a character")
    return ConstraintSpec("choice", json.dumps(list(choices)))


def object_constraint(field: str, wanted: bool) -> ConstraintSpec:
    if not wanted:
        raise InvalidFieldError(field, "is false: leave it out")
    return ConstraintSpec("json_object", "true")


@dataclass(frozen=True, kw_only=True)
class GenerateSpec:
    """A prompt that is continued, scored, or whose masks are filled.

    `names`: what the client calls an option or a structured field, where it isn't our name.
    """

    prompt: Prompt | None
    options: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    constraint: ConstraintSpec | None = None
    tools: Sequence[ToolSpec] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True


class EmbedInput(NamedTuple):
    prompt: Prompt | None
    field: str  # of the input as a whole
    range: tuple[int, int] | None = None  # only these of its tokens are pooled


@dataclass(frozen=True, kw_only=True)
class EmbedSpec:
    inputs: Sequence[EmbedInput]
    options: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The tools that the model is shown, and how calls are read from its answer."""

    tools: tuple[ToolSpec, ...]  # whose parameters are parsed
    mode: ToolMode
    names: tuple[str, ...] = ()  # that may be called
    tool_call_format: ToolCallFormat = PLAIN
    marker_id: int | None = None  # the format's marker, if it is one token that was added
    constraint: Constraint | None = None  # None: nothing is called


@dataclass(frozen=True, kw_only=True)
class ParsedRequest:
    """A checked request for the engine, and what is done with its outputs."""

    request: Request
    stop: tuple[str, ...] = ()
    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # of masks, too
    normalize: bool = False  # embeddings
    dimensions: int | None = None  # of embeddings; None: all
    tools: ToolUse | None = None
    names: Mapping[str, str] = field(default_factory=dict)  # as in GenerateSpec

    @property
    def given_ids(self) -> tuple[int, ...]:
        """What is continued, or translated."""
        return self.request.source_ids or self.request.prompt_ids


def renamed(error: InvalidFieldError, names: Mapping[str, str]) -> InvalidFieldError:
    """The same error under the name that the client wrote."""
    name = names.get(error.field.partition(".")[0])
    return error if name is None else InvalidFieldError(name, error.reason)
