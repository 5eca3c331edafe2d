"""A corpus becomes token ids: what training and evaluation read.

Knows: corpora, the tokenizer, both families. Does not know: batches' order, the network.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quill.model.data.batches import PairTokens, TokenPair
from quill.model.data.splits import Pair, PairCorpus, TextCorpus
from quill.model.data.tokenizer import (
    CAUSAL_SPECIAL_TOKENS,
    SEQ2SEQ_SPECIAL_TOKENS,
    SpecialTokens,
    Tokenizer,
    train_bpe,
)
from quill.model.errors import CorpusError

NUM_PARTS = 20

Track = Callable[[list[Sequence[str]]], Iterable[Sequence[str]]]  # watches parts go by


@dataclass(frozen=True)
class TextData:
    """One stream of ids for training and one that training never sees."""

    train_ids: Tensor
    held_out_ids: Tensor
    num_held_out_bytes: int


@dataclass(frozen=True)
class PairData:
    """Pairs for training and pairs that training never sees."""

    train: list[TokenPair]
    held_out: list[TokenPair]
    special: PairTokens
    num_dropped: int  # training pairs too long for the context


def fit_text_tokenizer(
    corpus: TextCorpus, vocab_size: int, special_tokens: Sequence[str] = CAUSAL_SPECIAL_TOKENS
) -> Tokenizer:
    return train_bpe(corpus.train, vocab_size, special_tokens)


def fit_pair_tokenizer(corpus: PairCorpus, vocab_size: int) -> Tokenizer:
    """One vocabulary for both languages, as in the paper."""
    texts = [text for pair in corpus.train for text in (pair.source, pair.target)]
    return train_bpe(texts, vocab_size, SEQ2SEQ_SPECIAL_TOKENS)


def encode_text(corpus: TextCorpus, tokenizer: Tokenizer, track: Track = iter) -> TextData:
    return TextData(
        train_ids=encode_stream(corpus.train, tokenizer, track),
        held_out_ids=encode_stream(corpus.held_out, tokenizer),
        num_held_out_bytes=sum(len(text.encode()) for text in corpus.held_out),
    )


def encode_stream(texts: Sequence[str], tokenizer: Tokenizer, track: Track = iter) -> Tensor:
    """All documents in a row, each after the token that begins one."""
    bos = [] if tokenizer.special.bos is None else [tokenizer.special.bos]
    documents = _encode_all(texts, tokenizer, track)
    ids = [token for document in documents for token in (*bos, *document)]
    return torch.tensor(ids, dtype=torch.int32)


def _encode_all(texts: Sequence[str], tokenizer: Tokenizer, track: Track) -> list[list[int]]:
    """In parts, which `track` watches go by. Each is large enough for all cores."""
    size = max(len(texts) // NUM_PARTS, 1)
    parts = [texts[start : start + size] for start in range(0, len(texts), size)]
    return [ids for part in track(parts) for ids in tokenizer.encode_all(part)]


def encode_pairs(
    corpus: PairCorpus, tokenizer: Tokenizer, context: int, track: Track = iter
) -> PairData:
    train = tokenize_pairs(corpus.train, tokenizer, track)
    fitting = [pair for pair in train if pair_fits(pair, context)]
    held_out = [
        pair for pair in tokenize_pairs(corpus.held_out, tokenizer) if pair_fits(pair, context)
    ]
    return PairData(fitting, held_out, pair_tokens(tokenizer.special), len(train) - len(fitting))


def tokenize_pairs(
    pairs: Sequence[Pair], tokenizer: Tokenizer, track: Track = iter
) -> list[TokenPair]:
    ids = _encode_all([text for pair in pairs for text in pair], tokenizer, track)
    return [TokenPair(s, t) for s, t in zip(ids[::2], ids[1::2], strict=True)]


def pair_fits(pair: TokenPair, context: int) -> bool:
    return max(len(pair.source), len(pair.target)) + 1 <= context


def pair_tokens(special: SpecialTokens) -> PairTokens:
    if special.bos is None or special.eos is None or special.pad is None:
        raise CorpusError(
            "this tokenizer has no <s>, </s> and <pad>; a seq2seq model needs all three"
        )
    return PairTokens(special.bos, special.eos, special.pad)
