"""Turns text into token ids and back, exactly.

Knows: byte-level BPE as the `tokenizers` library does it, which ids have a special meaning.
Does not know: torch, corpora, chat templates.

The round trip is exact for any Unicode text: no normalizer, no prefix space, no clean-up. The
whole tokenizer is one `tokenizer.json`; which special token plays which part is kept beside it by
whoever saves it.

Special tokens inside text are plain text unless the caller sets parse_special: a document or a user
that writes "<|endoftext|>" must not end anything.

Written twice on purpose: server/text/tokenizer.py reads the same tokenizer.json, imports nothing
from here, and must give the same ids and the same text.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from quill.model.errors import CheckpointError, ConfigError, RequestError
from quill.tokenizer_growth import read_checked

END_OF_TEXT = "<|endoftext|>"
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
CAUSAL_SPECIAL_TOKENS = (END_OF_TEXT,)
SEQ2SEQ_SPECIAL_TOKENS = (PAD, BOS, EOS)
CLASSIFIER, SEPARATOR, MASK = "[CLS]", "[SEP]", "[MASK]"
ENCODER_SPECIAL_TOKENS = (CLASSIFIER, SEPARATOR, MASK)

NUM_BYTES = 256


@dataclass(frozen=True)
class SpecialTokens:
    """The ids that play a part. A tokenizer needn't have all of them.

    In Quill's own causal tokenizers one token stands between documents, and so both ends a text and
    begins one.
    """

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    unk: int | None = None
    mask: int | None = None
    source_bos: int | None = None  # begins what a seq2seq encoder reads; its bos begins the answer

    @property
    def source_start(self) -> list[int]:
        return [] if self.source_bos is None else [self.source_bos]


class Tokenizer:
    """A tokenizer.json, and the part that each special token plays in it."""

    def __init__(self, inner: tokenizers.Tokenizer, special: SpecialTokens | None = None) -> None:
        """Without `special`, the parts go by the names of Quill's own tokens."""
        self._json = inner.to_str()
        self._parsing = tokenizers.Tokenizer.from_str(self._json)
        # The library keeps this choice in the object. One object for each keeps calls independent.
        self._plain = tokenizers.Tokenizer.from_str(self._json)
        self._plain.encode_special_tokens = True
        for each in (self._parsing, self._plain):
            # Some files say how long a text should be, for batches that aren't ours.
            each.no_padding()
            each.no_truncation()
            if isinstance(each.model, models.BPE):
                each.model.dropout = None  # at random: the same text must have the same tokens
        self.special = special if special is not None else _special_by_name(inner)

    @classmethod
    def load(cls, path: Path, special: SpecialTokens | None = None) -> "Tokenizer":
        text = _read_json(path)
        try:
            read_checked(text)
            return cls(tokenizers.Tokenizer.from_str(text), special)
        except Exception as error:  # the library raises a bare Exception for what it can't read
            raise CheckpointError(f"{path} can't be read as a tokenizer: {error}.") from error

    def save(self, path: Path) -> None:
        path.write_text(self._json, encoding="utf-8")

    def to_json(self) -> str:
        """The whole tokenizer.json."""
        return self._json

    @property
    def vocab_size(self) -> int:
        return self._parsing.get_vocab_size()

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of every token, special ones included."""
        return self._parsing.get_vocab()

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        """The ids of a text. None is added: bos and eos are the caller's business."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the text isn't Unicode: {error}") from error
        inner = self._parsing if parse_special else self._plain
        return list(inner.encode(text, add_special_tokens=False).ids)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Many plain texts at once, on all cores."""
        encodings = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return [list(encoding.ids) for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """The text of some ids. Bytes that make no whole character become U+FFFD."""
        return self._parsing.decode(list(ids), skip_special_tokens=skip_special)


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    special_tokens: Sequence[str] = CAUSAL_SPECIAL_TOKENS,
) -> Tokenizer:
    """Learns a byte-level BPE. Ids: special tokens, the 256 bytes, merges by rank.

    The vocabulary is smaller than requested if the texts don't have that many repeated parts.
    """
    smallest = NUM_BYTES + len(special_tokens)
    if vocab_size < smallest:
        raise ConfigError(
            f"A vocabulary of {vocab_size} tokens is too small: {NUM_BYTES} bytes and"
            f" {len(special_tokens)} special tokens need at least {smallest}."
        )
    # The pattern (GPT-2's) parts letters from signs, so no merge can ever spell "<s>".
    inner = _byte_level(models.BPE(), use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=_added(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stdout.isatty(),  # in a file its bars are blank lines
    )
    inner.train_from_iterator(texts, trainer)
    return Tokenizer(inner)


def byte_tokenizer(special_tokens: Sequence[str] = CAUSAL_SPECIAL_TOKENS) -> Tokenizer:
    """One token for each byte, after the special tokens: id = byte + number of special tokens."""
    pieces = [*special_tokens, *_byte_characters()]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    inner = _byte_level(models.BPE(vocabulary, []), use_regex=False)
    inner.add_special_tokens(_added(special_tokens))
    return Tokenizer(inner)


def _byte_level(model: models.Model, use_regex: bool) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    inner.decoder = decoders.ByteLevel()
    return inner


def _added(names: Sequence[str]) -> list[AddedToken]:
    """A mask stands for a whole token, and those of words begin with the space before them."""
    return [AddedToken(name, special=True, normalized=False, lstrip=name == MASK) for name in names]


def _byte_characters() -> list[str]:
    """The character that stands for each byte: itself if visible, else one from 256 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(NUM_BYTES) if byte not in visible]
    stand_ins = {byte: NUM_BYTES + index for index, byte in enumerate(hidden)}
    return [chr(stand_ins.get(byte, byte)) for byte in range(NUM_BYTES)]


def _special_by_name(inner: tokenizers.Tokenizer) -> SpecialTokens:
    # Only added tokens count: an ordinary piece may happen to be spelt the same.
    ids = {token.content: index for index, token in inner.get_added_tokens_decoder().items()}
    end_of_text = ids.get(END_OF_TEXT)
    return SpecialTokens(
        bos=ids.get(BOS, ids.get(CLASSIFIER, end_of_text)),
        eos=ids.get(EOS, ids.get(SEPARATOR, end_of_text)),
        pad=ids.get(PAD),
        mask=ids.get(MASK),
    )


def _read_json(path: Path) -> str:
    """The file's text, checked first: the library's errors are vague."""
    try:
        text = path.read_text("utf-8")
        content = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read as a tokenizer: {error}.") from error
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or "vocab" not in model:
        raise CheckpointError(f"{path} is not a tokenizer.json: it has no model with a vocabulary.")
    return text
