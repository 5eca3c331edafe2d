"""What becomes of generated tokens as they come: text, cut at stop strings, and tool calls.

Knows: bytes, characters, stop strings, the formats of tool calls. Does not know: grammars, schemas.

A token may end within a character, and a stop string may span tokens: text is held back until it is
clear. A grammar constrains tool calls to their format, so nothing is checked here. However a text
is cut into deltas, their sum is the same.
"""

import codecs
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from quill.server.tools import ToolCallDelta, ToolCallFormat

_BROKEN = "\ufffd"
_MAX_TOKENS_OF_A_CHARACTER = 4  # UTF-8 has at most four bytes


class Decoder(Protocol):
    def add(self, token_id: int) -> str:
        """The text that this token completes."""

    def end(self) -> str:
        """The rest. Bytes that never became a character show as U+FFFD."""


class ByteDecoder:
    """For tokenizers whose tokens are bytes: exact, and one look-up a token."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        return self._utf8.decode(self._bytes_of(token_id))

    def end(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For all others: a token's text may depend on its neighbors, so a few are decoded again."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._released: list[int] = []  # the tokens of the text before
        self._held: list[int] = []

    def add(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._held_text()
        if text.endswith(_BROKEN) and len(self._held) < _MAX_TOKENS_OF_A_CHARACTER:
            return ""
        if text:
            self._released, self._held = self._held, []
        return text

    def end(self) -> str:
        return self._held_text() if self._held else ""

    def _held_text(self) -> str:
        return self._decode([*self._released, *self._held])[len(self._decode(self._released)) :]


class Released(NamedTuple):
    """`text` may be shown. `found`: a stop string began where it ends; nothing follows."""

    text: str
    found: bool


class StopStrings:
    """Holds back text that may still become a stop string, and ends it at one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def add(self, text: str) -> Released:
        if not self._stops:
            return Released(text, False)
        text, self._held = self._held + text, ""
        # The one that ends first, so that it doesn't matter in which deltas the text came.
        places = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if places:
            return Released(text[: min(places)[1]], True)
        num_held = num_begun(text, self._stops)
        self._held = text[len(text) - num_held :]
        return Released(text[: len(text) - num_held], False)

    def end(self) -> str:
        """No more will come, so what was held back is plain text."""
        held, self._held = self._held, ""
        return held


def num_begun(text: str, strings: Sequence[str]) -> int:
    """The length of the longest end of the text that may still become one of the strings."""
    longest = min(len(text), max(map(len, strings)) - 1)
    tails = ((length, text[-length:]) for length in range(longest, 0, -1))
    return next((n for n, tail in tails if any(s.startswith(tail) for s in strings)), 0)


class Parsed(NamedTuple):
    text: str
    deltas: list[ToolCallDelta]


class ToolCallParser:
    """One sequence's. `id_of` names its calls, which are counted from 0."""

    def __init__(
        self,
        format_: ToolCallFormat,
        may_speak: bool,
        id_of: Callable[[int], str],
        names: Sequence[str] = (),
    ) -> None:
        """`may_speak`: the output may begin with a text, or be one. `names`: that may be called."""
        self._format = format_
        self._id_of = id_of
        self._held = ""  # what can't be told apart yet
        self._num_calls = 0
        self._json = _JsonObject()
        self._state = self._before_marker if may_speak else self._between_calls
        self._unmarked: dict[str, str] = {}  # how a call begins, without white space: its name
        if may_speak and format_.unmarked:
            heads = {"".join(format_.head(name).split()): name for name in names}
            self._unmarked = {
                block + head: heads[head] for block in ("", "```json") for head in heads
            }
            self._state = self._at_start

    def add(self, text: str) -> Parsed:
        self._held += text
        self._parsed = Parsed("", [])
        while self._held and self._state():
            pass
        return self._parsed

    def end(self) -> str:
        """No more will come, so what might have begun a call is plain text."""
        held, self._held = self._held, ""
        return held if self._state in (self._at_start, self._before_marker) else ""

    # Each state takes what it can, and returns whether the next one may go on.

    def _at_start(self) -> bool:
        """Some models write a call without its marker."""
        begun = "".join(self._held.split())
        head = next((head for head in self._unmarked if begun.startswith(head)), None)
        if head is not None:
            places = (at for at, character in enumerate(self._held) if not character.isspace())
            self._held = self._held[next(itertools.islice(places, len(head) - 1, None)) + 1 :]
            self._begin_call(self._unmarked[head])
        elif any(head.startswith(begun) for head in self._unmarked):
            return False
        else:
            self._state = self._before_marker
        return True

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
        self._held = rest
        self._begin_call(name.removeprefix(before))
        return True

    def _begin_call(self, name: str) -> None:
        self._state, self._json = self._arguments, _JsonObject()
        self._parsed.deltas.append(
            ToolCallDelta(self._num_calls, self._id_of(self._num_calls), name)
        )

    def _arguments(self) -> bool:
        if not self._json.has_begun:
            self._held = self._held.lstrip()
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
        self.has_begun = self.is_over = False

    def end(self, text: str) -> int:
        """Where the object ends in this text; the text's own end if it doesn't."""
        self.has_begun |= bool(text)
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
