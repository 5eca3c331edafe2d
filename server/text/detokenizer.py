"""Turns tokens into text as they come: never half a character, never part of a stop string.

Knows: how tokens spell bytes or text, stop strings. Does not know: tokenizers, requests, gRPC.

However the tokens are split into steps, the texts together are what decoding all tokens at once
would give, up to the stop string that ends first.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

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
