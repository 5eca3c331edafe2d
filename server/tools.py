"""Tools that a model may call, and how it writes its calls.

Knows: names, schemas, the forms that chat templates write calls in. Does not know: protobuf,
templates, grammars. A call is `{"name": "…", "arguments": {…}}` with something around it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Tool:
    name: str
    description: str
    parameters: dict[str, Any] | None  # a JSON Schema of an object; None: it takes no arguments


@dataclass(frozen=True, kw_only=True)
class ToolCallFormat:
    """What stands around calls."""

    name: str
    marker: str = ""  # begins calls, also after a text; none: an answer is a text or a call
    before: str = ""  # the first call, after the marker
    between: str | None = None  # two calls; None: an answer has one
    after: str = ""  # the last call
    key: str = "arguments"

    def head(self, name: str) -> str:
        """A call's beginning, up to its arguments. After these there is a brace."""
        return f'{{"name": "{name}", "{self.key}": '


# For a model that has none of its own.
PLAIN = ToolCallFormat(name="plain")
# Those that are known of models. Hermes' is Qwen's and Granite's, too.
TOOL_CALL_FORMATS = (
    ToolCallFormat(
        name="hermes",
        marker="<tool_call>",
        before="\n",
        between="\n</tool_call>\n<tool_call>\n",
        after="\n</tool_call>",
    ),
    ToolCallFormat(name="mistral", marker="[TOOL_CALLS]", before=" [", between=", ", after="]"),
    ToolCallFormat(name="mistral", marker="[TOOL_CALLS]", before="[", between=", ", after="]"),
    ToolCallFormat(name="llama3", key="parameters"),
)


@dataclass(frozen=True)
class ToolCallDelta:
    """What came to one call of an answer. Its first piece has its id and its name."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


def add_delta(pieces: list[ToolCallDelta], piece: ToolCallDelta) -> None:
    """To what its call had last, but for the piece that names it."""
    last = pieces[-1] if pieces else None
    if last is None or last.index != piece.index or last.id:
        pieces.append(piece)
    else:
        pieces[-1] = replace(last, arguments=last.arguments + piece.arguments)


def merge_deltas(pieces: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """All pieces of an answer, as one for each call."""
    calls: list[ToolCallDelta] = []
    for piece in pieces:
        if piece.index == len(calls):
            calls.append(piece)
        else:
            call = calls[piece.index]
            calls[piece.index] = replace(call, arguments=call.arguments + piece.arguments)
    return calls
