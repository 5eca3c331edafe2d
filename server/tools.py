"""Tool calls, and the formats in which models write them.

Knows: the formats of known chat templates. Does not know: protobuf, templates, grammars.
A call is `{"name": "…", "arguments": {…}}` between the markers of its format.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class ToolCallFormat:
    """The text around calls."""

    name: str
    marker: str = ""  # begins calls, also after a text; none: an answer is a text or a call
    before: str = ""  # the first call, after the marker
    between: str | None = None  # two calls; None: an answer has one
    after: str = ""  # the last call
    key: str = "arguments"
    unmarked: bool = False  # an answer may also be a call as plain JSON, in a block of code or not

    def head(self, name: str) -> str:
        """The text of a call before its arguments. After the arguments comes a brace."""
        return f'{{"name": "{name}", "{self.key}": '


# For a model whose chat template has none.
PLAIN = ToolCallFormat(name="plain")
# The formats of known models. Qwen and Granite use Hermes'.
TOOL_CALL_FORMATS = (
    ToolCallFormat(
        name="hermes",
        marker="<tool_call>",
        before="\n",
        between="\n</tool_call>\n<tool_call>\n",
        after="\n</tool_call>",
        unmarked=True,  # as Qwen2.5-Coder does nearly always
    ),
    ToolCallFormat(name="mistral", marker="[TOOL_CALLS]", before=" [", between=", ", after="]"),
    ToolCallFormat(name="mistral", marker="[TOOL_CALLS]", before="[", between=", ", after="]"),
    ToolCallFormat(name="llama3", key="parameters"),
)


@dataclass(frozen=True)
class ToolCallDelta:
    """What one call of an answer got. Its first delta has its id and its name."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


def add_delta(deltas: list[ToolCallDelta], delta: ToolCallDelta) -> None:
    """Joins a delta to the last one of the same call, unless that one names the call."""
    last = deltas[-1] if deltas else None
    if last is None or last.index != delta.index or last.id:
        deltas.append(delta)
    else:
        deltas[-1] = replace(last, arguments=last.arguments + delta.arguments)


def merge_deltas(deltas: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """All deltas of an answer, as one for each call."""
    calls: list[ToolCallDelta] = []
    for delta in deltas:
        if delta.index == len(calls):
            calls.append(delta)
        else:
            call = calls[delta.index]
            calls[delta.index] = replace(call, arguments=call.arguments + delta.arguments)
    return calls
