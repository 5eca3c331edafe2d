"""Encodes text to token ids and decodes them.

Knows: the bundle's tokenizer, which tokens are special. Does not know: requests, templates, gRPC.

Special tokens inside a user's text are plain text: "<|endoftext|>" in a prompt must not end
anything. Only a chat template's own special tokens count. The same rule as the reference,
model/data/tokenizer.py, written twice on purpose: the server imports nothing of that package.
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from quill.server.errors import StartError, StepError
from quill.server.text.streaming import ByteDecoder, Decoder, WindowDecoder
from quill.tokenizer_growth import read_checked

logger = logging.getLogger(__name__)

# Marks special tokens that users write in a conversation, so that they aren't taken for the
# template's own. By Unicode's definition it is never a character of any text.
_MARK = "\ufdd0"
_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")  # a byte of a character that has no token
# The library is slow: 4 million characters took seconds.
MAX_CHARACTERS_PER_TOKEN = 32
# Only the library's batch calls free the interpreter's lock, so every text is a batch of one here.
# By default the library would start threads of its own for a batch.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@contextmanager
def _panics_caught() -> Iterator[None]:
    """The library's panics are no Exceptions: one would leave a call without an end, or end the
    server. The library has printed its message to stderr. It may quote a prompt: it isn't logged.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        logger.error("the tokenizer failed; the lines before this one are its own message")
        raise StepError("the tokenizer failed; the server's stderr has more") from error


class Text:
    """A tokenizer.json. Safe to use from several threads."""

    def __init__(self, tokenizer_json: str, bos: int | None = None, eos: int | None = None) -> None:
        """`bos` and `eos` begin and end each text that the model reads, if they are given."""
        # First: the library normalizes added tokens when it reads them.
        settings = read_checked(tokenizer_json)
        self._parsing = _open(tokenizer_json)
        # The library keeps this option in the object. One object for each keeps calls independent.
        self._plain = _open(tokenizer_json)
        self._plain.encode_special_tokens = True
        self._bos = bos
        self._eos = eos
        added = self._parsing.get_added_tokens_decoder()
        self._added = {token.content: id for id, token in added.items()}
        self._special = {token.content: id for id, token in added.items() if token.special}
        self._special_ids = frozenset(self._special.values())
        self._any_added = _any_of(self._added)
        self._any_special = _any_of(self._special)
        decoder = settings.get("decoder") or {}
        self._is_byte_level = decoder.get("type") == "ByteLevel"
        self._falls_back = "ByteFallback" in _types(decoder)
        self._bytes: dict[int, bytes] = {}
        self._spelled: dict[int, bytes] = {}
        longest = max(map(len, self._parsing.get_vocab()), default=1)
        # Of a text as a whole: a token can stand for more, but hardly every token of a long text.
        self.max_characters_per_token = min(4 * longest, MAX_CHARACTERS_PER_TOKEN)

    @classmethod
    def load(cls, path: Path, bos: int | None, eos: int | None = None) -> "Text":
        try:
            with _panics_caught():
                return cls(path.read_text("utf-8"), bos, eos)
        except Exception as error:  # the library raises bare ones
            raise StartError(f"{path} can't be read as a tokenizer: {error}") from error

    @_panics_caught()
    def encode(self, text: str, whole: bool = True) -> list[int]:
        """A plain text. `whole`: with BOS and EOS, if the model has them."""
        ids = _ids(self._plain, text)
        return self._ended(self._begun(ids, whole), whole)

    @_panics_caught()
    def encode_masked(self, text: str, mask: int) -> list[int]:
        """A whole text, in which one special token counts: the mask, as it is written."""
        parts = text.split(self.piece(mask))
        ids = self._encode_marked(self.piece(mask).join(map(self.mark, parts)))
        return self._ended(self._begun(ids, begin=True), end=True)

    @_panics_caught()
    def encode_rendered(self, text: str) -> list[int]:
        """A rendered template: its special tokens count, marked ones are plain text again."""
        ids = self._encode_marked(text)
        return self._begun(ids, begin=not ids or ids[0] != self._bos)

    def mark(self, text: str) -> str:
        """A user's text, with its special tokens marked as plain text."""
        text = text.replace(_MARK, "")
        if self._any_special.search(text) is None:
            return text
        for token in self._special:
            text = text.replace(token, token[:1] + _MARK + token[1:])
        return text

    def split(self, text: str) -> list[str | int]:
        """A text cut at added tokens, special or not, which become ids."""
        parts = re.split(f"({self._any_added.pattern})", text)
        return [self._added.get(part, part) for part in parts if part]

    @_panics_caught()
    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Bytes that make no whole character become U+FFFD."""
        (text,) = self._parsing.decode_batch([list(ids)], skip_special_tokens=skip_special)
        return str(text)

    def piece(self, token_id: int) -> str:
        """A token by itself."""
        if self._is_byte_level:
            return self._bytes_of(token_id).decode("utf-8", "replace")
        return self.decode([token_id], skip_special=False)

    def spelled(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; of a special token, its name."""
        if token_id not in self._spelled:
            self._spelled[token_id] = self._spell(token_id)
        return self._spelled[token_id]

    def decoder(self) -> Decoder:
        """Decodes one sequence, token by token."""
        if self._is_byte_level:
            return ByteDecoder(self._visible_bytes_of)
        return WindowDecoder(self.decode)

    def _begun(self, ids: Sequence[int], begin: bool) -> list[int]:
        return [self._bos, *ids] if begin and self._bos is not None else list(ids)

    def _ended(self, ids: list[int], end: bool) -> list[int]:
        return [*ids, self._eos] if end and self._eos is not None else ids

    def _encode_marked(self, text: str) -> list[int]:
        if _MARK not in text:
            return _ids(self._parsing, text)
        return [id for part in self._parts(text) for id in self._encode_part(part)]

    def _parts(self, text: str) -> list[str]:
        """Cut so that each special token is a part of its own."""
        return re.split(f"({self._any_special.pattern})", text)

    def _encode_part(self, part: str) -> list[int]:
        if part in self._special:
            return [self._special[part]]
        return self.encode(part.replace(_MARK, ""), whole=False)

    def _visible_bytes_of(self, token_id: int) -> bytes:
        return b"" if token_id in self._special_ids else self._bytes_of(token_id)

    def _spell(self, token_id: int) -> bytes:
        name = self._parsing.id_to_token(token_id) or ""
        if token_id in self._special_ids:
            return name.encode()
        if self._is_byte_level:
            return self._bytes_of(token_id)
        if self._falls_back and (byte := _FALLBACK.fullmatch(name)):
            return bytes.fromhex(byte[1])
        # At the beginning of a text a decoder drops the space that a token may begin with: so the
        # token is decoded behind another.
        alone, twice = self.decode([token_id]), self.decode([token_id, token_id])
        return twice[len(alone) :].encode()

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id not in self._bytes:
            self._bytes[token_id] = _bytes_of_piece(self._parsing.id_to_token(token_id) or "")
        return self._bytes[token_id]


def _open(tokenizer_json: str) -> tokenizers.Tokenizer:
    """Without padding and truncation: the server decides lengths. Without BPE's dropout, which is
    for training: the same text must have the same tokens."""
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if isinstance(tokenizer.model, tokenizers.models.BPE):
        tokenizer.model.dropout = None
    return tokenizer


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Of two that begin alike, the longer one."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return list(encoding.ids)


def _types(decoder: Mapping[str, Any]) -> set[str]:
    """The types of a decoder and of its parts."""
    parts = map(_types, decoder.get("decoders", ()))
    return {decoder.get("type", "")}.union(*parts)


def _bytes_of_piece(piece: str) -> bytes:
    """As the library's byte-level decoder: each character stands for a byte, or none does."""
    if all(character in _BYTES for character in piece):
        return bytes(_BYTES[character] for character in piece)
    return piece.encode("utf-8")


def _byte_characters() -> dict[str, int]:
    """The character that stands for each byte: itself if visible, else one from 256 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    stand_ins = {chr(256 + index): byte for index, byte in enumerate(hidden)}
    return {chr(byte): byte for byte in visible} | stand_ins


_BYTES = _byte_characters()
