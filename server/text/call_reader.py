"""Takes an answer that has calls of tools apart, as it comes: what is said, and what is called.

Knows: the forms that calls are written in. Does not know: tokens, grammars, schemas.

A grammar keeps the answer to its form, so nothing is checked here. It may be cut anywhere, and come
in any pieces: what they are together is the same.
"""

from collections.abc import Callable
from typing import NamedTuple

from quill.server.tools import CallForm, CallPiece


class Read(NamedTuple):
    text: str
    pieces: list[CallPiece]


class CallReader:
    """One answer's. `id_of` names its calls, which are counted from 0."""

    def __init__(self, form: CallForm, may_speak: bool, id_of: Callable[[int], str]) -> None:
        """`may_speak`: the answer may begin with a text, or be one."""
        self._form = form
        self._id_of = id_of
        self._held = ""  # what can't be told apart yet
        self._num_calls = 0
        self._json = _JsonObject()
        self._state = self._speak if may_speak else self._wait

    def add(self, text: str) -> Read:
        self._held += text
        self._read = Read("", [])
        while self._held and self._state():
            pass
        return self._read

    def end(self) -> str:
        """No more will come, so what might have begun a call is plain text."""
        held, self._held = self._held, ""
        return held if self._state == self._speak else ""

    # Each state takes what it can, and says whether the next one may go on.

    def _speak(self) -> bool:
        marker = self._form.marker
        if not marker:
            self._state = self._wait if self._held.startswith("{") else self._say
            return True
        at = self._held.find(marker)
        if at < 0:
            self._tell(len(self._held) - _num_begun(self._held, marker))
            return False
        self._tell(at)
        self._held = self._held.removeprefix(marker)
        self._state = self._wait
        return True

    def _say(self) -> bool:
        self._tell(len(self._held))
        return False

    def _wait(self) -> bool:
        """Around calls there is no brace."""
        at = self._held.find("{")
        if at < 0:
            self._held = ""
            return False
        self._held, self._state = self._held[at:], self._name
        return True

    def _name(self) -> bool:
        before, after = self._form.head("\0").split("\0")
        name, found, rest = self._held.partition(after)
        if not found:
            return False
        self._held, self._state, self._json = rest, self._call, _JsonObject()
        id = self._id_of(self._num_calls)
        self._read.pieces.append(CallPiece(self._num_calls, id, name.removeprefix(before)))
        return True

    def _call(self) -> bool:
        end = self._json.end(self._held)
        piece, self._held = self._held[:end], self._held[end:]
        self._read.pieces.append(CallPiece(self._num_calls, arguments=piece))
        if not self._json.is_over:
            return False
        self._num_calls += 1
        self._state = self._wait
        return True

    def _tell(self, length: int) -> None:
        self._read = self._read._replace(text=self._read.text + self._held[:length])
        self._held = self._held[length:]


class _JsonObject:
    """Finds where one ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self.is_over = False

    def end(self, text: str) -> int:
        """Where it ends in what comes next; if it doesn't, where that ends."""
        for place, character in enumerate(text, start=1):
            self._see(character)
            if self.is_over:
                return place
        return len(text)

    def _see(self, character: str) -> None:
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


def _num_begun(text: str, marker: str) -> int:
    """The length of the longest end of the text that begins the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
