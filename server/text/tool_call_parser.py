"""Parses tool calls out of generated text as it comes: what is text, and what is a call.

Knows: the formats that calls are written in. Does not know: tokens, grammars, schemas.

A grammar constrains the output to the format, so nothing is checked here. The text may be cut
anywhere, and come in any deltas: their sum is the same.
"""

from collections.abc import Callable
from typing import NamedTuple

from quill.server.text.detokenizer import num_begun
from quill.server.tools import ToolCallDelta, ToolCallFormat


class Parsed(NamedTuple):
    text: str
    deltas: list[ToolCallDelta]


class ToolCallParser:
    """One sequence's. `id_of` names its calls, which are counted from 0."""

    def __init__(
        self, format_: ToolCallFormat, may_speak: bool, id_of: Callable[[int], str]
    ) -> None:
        """`may_speak`: the output may begin with a text, or be one."""
        self._format = format_
        self._id_of = id_of
        self._held = ""  # what can't be told apart yet
        self._num_calls = 0
        self._json = _JsonObject()
        self._state = self._before_marker if may_speak else self._between_calls

    def add(self, text: str) -> Parsed:
        self._held += text
        self._parsed = Parsed("", [])
        while self._held and self._state():
            pass
        return self._parsed

    def end(self) -> str:
        """No more will come, so what might have begun a call is plain text."""
        held, self._held = self._held, ""
        return held if self._state == self._before_marker else ""

    # Each state takes what it can, and returns whether the next one may go on.

    def _before_marker(self) -> bool:
        marker = self._format.marker
        if not marker:
            self._state = self._between_calls if self._held.startswith("{") else self._plain_text
            return True
        at = self._held.find(marker)
        if at < 0:
            self._release(len(self._held) - num_begun(self._held, [marker]))
            return False
        self._release(at)
        self._held = self._held.removeprefix(marker)
        self._state = self._between_calls
        return True

    def _plain_text(self) -> bool:
        self._release(len(self._held))
        return False

    def _between_calls(self) -> bool:
        """Around calls there is no brace."""
        at = self._held.find("{")
        if at < 0:
            self._held = ""
            return False
        self._held, self._state = self._held[at:], self._name
        return True

    def _name(self) -> bool:
        before, after = self._format.head("\0").split("\0")
        name, found, rest = self._held.partition(after)
        if not found:
            return False
        self._held, self._state, self._json = rest, self._arguments, _JsonObject()
        id = self._id_of(self._num_calls)
        self._parsed.deltas.append(ToolCallDelta(self._num_calls, id, name.removeprefix(before)))
        return True

    def _arguments(self) -> bool:
        end = self._json.end(self._held)
        text, self._held = self._held[:end], self._held[end:]
        self._parsed.deltas.append(ToolCallDelta(self._num_calls, arguments=text))
        if not self._json.is_over:
            return False
        self._num_calls += 1
        self._state = self._between_calls
        return True

    def _release(self, length: int) -> None:
        self._parsed = self._parsed._replace(text=self._parsed.text + self._held[:length])
        self._held = self._held[length:]


class _JsonObject:
    """Finds where one ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self.is_over = False

    def end(self, text: str) -> int:
        """Where the object ends in this text; the text's own end if it doesn't."""
        for place, character in enumerate(text, start=1):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{}":
                self._depth += 1 if character == "{" else -1
                self.is_over = not self._depth
            if self.is_over:
                return place
        return len(text)
