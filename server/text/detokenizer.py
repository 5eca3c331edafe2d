"""Tokens become text one after another: never half a character, never part of a stop string.

Knows: how tokens spell bytes or text. Does not know: tokenizers, requests, gRPC.

Whatever the cuts, the pieces together are the text that decoding all tokens at once would give.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_BROKEN = "\ufffd"
_MAX_TOKENS_OF_A_CHARACTER = 4  # UTF-8 has at most four bytes


class Decoder(Protocol):
    def add(self, token_id: int) -> str:
        """What is certain now, and wasn't before."""

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
    """For all others: a token's text may depend on its neighbours, so a few are decoded again."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._told: list[int] = []  # the tokens of the piece before
        self._held: list[int] = []

    def add(self, token_id: int) -> str:
        self._held.append(token_id)
        piece = self._piece()
        if piece.endswith(_BROKEN) and len(self._held) < _MAX_TOKENS_OF_A_CHARACTER:
            return ""
        if piece:
            self._told, self._held = self._held, []
        return piece

    def end(self) -> str:
        return self._piece() if self._held else ""

    def _piece(self) -> str:
        return self._decode([*self._told, *self._held])[len(self._decode(self._told)) :]
