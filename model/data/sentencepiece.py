"""Reads SentencePiece's Unigram files, and makes a tokenizer of Marian's: one file for texts that
are read, and a vocabulary that has the pieces of both languages.

Knows: the wire format of such a file, which of its settings Quill's tokenizers can follow.
Does not know: the rest of a model.
"""

import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from quill.model.errors import CheckpointError, UnsupportedError, first_few

SPACE = "▁"
UNKNOWN = "<unk>"
_SPECIAL = ("</s>", UNKNOWN, "<pad>")
_LANGUAGE = re.compile(r">>\S+<<")  # before a text: which language the answer shall have
_NORMAL, _UNIGRAM = 1, 1
_NO_CHARACTER = "\ufdd0"  # by Unicode's definition in no text: always unknown
# Of pieces that only answers have: below all sums of others, so that a text is never cut into them
# unless it has characters that nothing else has.
_LAST = -1e6
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5


class Unigram(NamedTuple):
    """A file's pieces with their scores, and its table of replaced characters."""

    scores: dict[str, float]
    charsmap: bytes


def read_unigram(path: Path) -> Unigram:
    try:
        model = list(_fields(path.read_bytes()))
        pieces = [dict(_fields(value)) for number, value in model if number == 1]
        trained, normalized = (
            dict(_fields(b"".join(value for number, value in model if number == wanted)))
            for wanted in (2, 3)
        )
        scores = {
            piece[1].decode(): struct.unpack("<f", piece[2])[0]
            for piece in pieces
            if piece.get(3, _NORMAL) == _NORMAL
        }
    except (OSError, IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise CheckpointError(f"can't read {path} as a SentencePiece model: {error!r}") from error
    # Their numbers in SentencePiece's ModelProto; each is 1 by default.
    known = (trained.get(3, 1), normalized.get(3, 1), normalized.get(4, 1), normalized.get(5, 1))
    if known != (_UNIGRAM, 1, 1, 1):
        raise UnsupportedError(
            f"{path} has the model_type, add_dummy_prefix, remove_extra_whitespaces and "
            f"escape_whitespaces {known}; Quill reads (1, 1, 1, 1): Unigram, and all of them"
        )
    return Unigram(scores, normalized.get(2, b""))


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The numbers of a protocol buffer's fields and their values: integers or bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            if shift > 63:
                raise ValueError("a number of more than 64 bits")
            value |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == _VARINT:
            yield key >> 3, varint()
            continue
        size = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}.get(key & 7)
        if size is None:
            if key & 7 != _BYTES:
                raise ValueError(f"a field of the wire type {key & 7}")
            size = varint()
        if at + size > len(message):
            raise ValueError("a field that is longer than its message")
        yield key >> 3, message[at : at + size]
        at += size


def marian_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    """Of source.spm, whose pieces have the ids that vocab.json gives them."""
    source = read_unigram(directory / "source.spm")
    tokens = _read_vocabulary(directory / "vocab.json")
    lacking = sorted(set(source.scores) - set(tokens))
    unplaced = [piece for piece in lacking if len(piece.removeprefix(SPACE)) != 1]
    if unplaced:
        raise UnsupportedError(
            f"{directory / 'vocab.json'} lacks {first_few(unplaced)}, pieces of source.spm; Quill "
            "can do without single characters only"
        )
    vocabulary = [(token, source.scores.get(token, _LAST)) for token in tokens]
    inner = tokenizers.Tokenizer(models.Unigram(vocabulary, tokens.index(UNKNOWN)))
    # A piece without an id is one unknown token, and so is what replaces it.
    replaced = [
        normalizers.Replace(piece, _NO_CHARACTER) for piece in lacking if piece.startswith(SPACE)
    ]
    charsmap = [normalizers.Precompiled(source.charsmap)] if source.charsmap else []
    inner.normalizer = normalizers.Sequence(
        [
            *charsmap,
            normalizers.Strip(),
            normalizers.Replace(Regex(" +"), SPACE),
            normalizers.Prepend(SPACE),
            *replaced,
        ]
    )
    inner.pre_tokenizer = pre_tokenizers.Split(SPACE, behavior="merged_with_next")
    inner.decoder = decoders.Metaspace(SPACE, prepend_scheme="always")
    inner.add_special_tokens([_added(token, True) for token in _SPECIAL if token in tokens])
    inner.add_tokens([_added(token, False) for token in tokens if _LANGUAGE.fullmatch(token)])
    return inner


def _added(token: str, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def _read_vocabulary(path: Path) -> list[str]:
    """The tokens in the order of their ids."""
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"can't read {path}: {error}") from error
    if not isinstance(ids, Mapping) or set(ids.values()) != set(range(len(ids))):
        raise CheckpointError(f"{path} doesn't have a token for each id from 0 on")
    if UNKNOWN not in ids:
        raise CheckpointError(f"{path} has no token {UNKNOWN}")
    return sorted(ids, key=lambda token: int(ids[token]))
