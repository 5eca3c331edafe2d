"""Chooses the text that perplexity is measured on, and masks an encoder's tokens in it; and other
text to calibrate on.

Knows: where held-out text comes from. Does not know: graphs, what is compared.

In this order: the user's file; what the checkpoint's training run held out, or for imported weights
`sotu`; and for a model without a tokenizer, or whose data is gone, changed or too short, tokens
that are sampled from the model. An imported translator, whose languages are unknown, translates
sentences of `sotu`, and its own answers are the text. Another corpus would be noise to such a
model, and perplexity on noise doesn't measure what a precision loses. A large model without a
tokenizer gets random tokens all the same: its KL divergence from PyTorch still tells.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from quill.export.errors import ExportError
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.checkpoint.run_directory import source_of
from quill.model.checkpoint.tensors import lazy
from quill.model.data.batches import IGNORED, mix
from quill.model.data.corpora import load_pairs_file, load_programs
from quill.model.data.dataset import encode_stream, pair_fits, pair_tokens, tokenize_pairs
from quill.model.data.masking import MaskingTokens, mask_tokens
from quill.model.data.source import DataSource
from quill.model.data.splits import Pair
from quill.model.data.tokenizer import Tokenizer
from quill.model.errors import CheckpointError, CorpusError
from quill.model.network.attention import CrossKeyValue
from quill.model.network.network import Network
from quill.model.reference.generate import generate
from quill.model.reference.sampling import SamplingParameters

NUM_PASSAGES = 16  # of models up to FEW_PARAMETERS; larger ones have fewer, and at least
MIN_PASSAGES = 4
FEW_PARAMETERS = 400_000_000
NUM_CALIBRATION = 16  # passages of models of FEW_PARAMETERS; smaller ones have more, larger fewer
MIN_CALIBRATION, MAX_CALIBRATION = 8, 64
MAX_DOCUMENTS = 24  # of a corpus that are read for them
NUM_PAIRS = 128
NUM_SENTENCES = 24
PASSAGE_TOKENS = 256
_SAMPLED = "tokens sampled from the model"
_RANDOM = "random tokens"
MAX_SAMPLED = 300_000_000  # parameters of a model that is whole in memory to sample from it
NUM_MASKS = 2  # maskings of each passage, with different tokens
MASK_SEED = 20181011  # the day "BERT" appeared
SEED = 20170612  # the day "Attention Is All You Need" appeared


@dataclass(frozen=True)
class Passage:
    """Consecutive tokens, and for seq2seq the source that they translate."""

    ids: tuple[int, ...]
    source: tuple[int, ...] = ()
    past: int = 0  # positions before it (export/verify/pytorch_reference.py has what is there)


@dataclass(frozen=True)
class HeldOut:
    """Passages, and where they come from."""

    name: str
    passages: list[Passage]


@dataclass(frozen=True)
class MaskedText:
    """A text with masked tokens: where they are, and what they were."""

    ids: tuple[int, ...]
    places: tuple[int, ...]
    targets: tuple[int, ...]


def held_out(checkpoint: Checkpoint, text: Path | None) -> HeldOut:
    """Passages no longer than the context."""
    tokenizer = checkpoint.tokenizer
    if tokenizer is None:
        if text is not None:
            raise ExportError(f"--text {text} needs a tokenizer, and the checkpoint has none")
        return _sampled_from_the_model(checkpoint)
    if text is not None:
        if checkpoint.config.family == "seq2seq":
            return _pairs(checkpoint, tokenizer, str(text), load_pairs_file(text).held_out)
        return _text(checkpoint, str(text), tokenizer.encode_all([_read(text)]))
    try:
        return _of_training(checkpoint, tokenizer)
    except (CorpusError, CheckpointError, ExportError) as error:  # export must work all the same
        kind = _RANDOM if checkpoint.config.family == "encoder" else _SAMPLED
        print(
            f"Verifying on {kind}, because {error}. --text FILE gives other text",
            file=sys.stderr,
        )
        return _sampled_from_the_model(checkpoint)


def calibration_text(checkpoint: Checkpoint, text: Path | None) -> HeldOut | None:
    """Passages for a causal model that aren't held out; None if there would be random tokens only.
    The user's file is used if it has enough besides the passages that are held out of it."""
    try:
        if checkpoint.tokenizer is not None:
            return _not_held_out(checkpoint, checkpoint.tokenizer, text)
    except (CorpusError, CheckpointError, ExportError):
        pass  # `held_out` prints why
    sampled = _sampled_from_the_model(checkpoint, SEED + 1, num_calibration(checkpoint))
    return None if sampled.name == _RANDOM else sampled


def _not_held_out(checkpoint: Checkpoint, tokenizer: Tokenizer, text: Path | None) -> HeldOut:
    if text is not None:
        documents = tokenizer.encode_all([_read(text)])
        taken = {passage.ids for passage in _text(checkpoint, str(text), documents).passages}
        windows = [ids for ids in _windows(checkpoint, str(text), documents) if ids not in taken]
        if len(windows) >= len(taken):
            return HeldOut(str(text), _spread(windows, num_calibration(checkpoint)))
    source = source_of(checkpoint)
    corpus = (source or DataSource("sotu")).load_text()
    some = corpus.train[:: max(1, len(corpus.train) // MAX_DOCUMENTS)]
    parts = [(corpus.name, encode_stream(some, tokenizer).tolist())]
    if source is None:  # weights from elsewhere may be for programs
        parts += _programs(tokenizer)
    passages: list[Passage] = []
    for name, ids in parts:
        number = num_calibration(checkpoint) // len(parts)
        passages += _spread(_windows(checkpoint, name, [ids]), number)
    return HeldOut(" and ".join(name for name, _ in parts), passages)


def num_calibration(checkpoint: Checkpoint) -> int:
    """Passages to calibrate on: the more text, the less of what it tells is chance."""
    number = NUM_CALIBRATION * FEW_PARAMETERS // max(1, _size(checkpoint))
    return min(max(number, MIN_CALIBRATION), MAX_CALIBRATION)


def _programs(tokenizer: Tokenizer) -> list[tuple[str, list[int]]]:
    """Programs, and English about them, if they can be had."""
    try:
        return [("programs of bfcl-eval", encode_stream(load_programs(), tokenizer).tolist())]
    except CorpusError as error:
        print(
            f"Calibrating on prose alone, because {error} --text FILE gives other text",
            file=sys.stderr,
        )
        return []


def _of_training(checkpoint: Checkpoint, tokenizer: Tokenizer) -> HeldOut:
    """What the training run held out. File names stay out of the bundle."""
    source = source_of(checkpoint)
    is_pairs = checkpoint.config.family == "seq2seq"
    if source is None and is_pairs:
        return _translated(checkpoint, tokenizer, DataSource("sotu").load_text().held_out)
    source = source or DataSource("sotu")
    name = (source.corpus or "the training run's data") + ", held out"
    if is_pairs:
        return _pairs(checkpoint, tokenizer, name, source.load_pairs().held_out)
    documents = source.load_text().held_out
    if source.corpus is None:  # files may be shorter than a passage: joined, as in training
        return _text(checkpoint, name, [encode_stream(documents, tokenizer).tolist()])
    return _text(checkpoint, name, tokenizer.encode_all(documents))


def _text(checkpoint: Checkpoint, name: str, documents: list[list[int]]) -> HeldOut:
    num = max(MIN_PASSAGES, NUM_PASSAGES * FEW_PARAMETERS // max(FEW_PARAMETERS, _size(checkpoint)))
    return HeldOut(name, _spread(_windows(checkpoint, name, documents), num))


def _windows(
    checkpoint: Checkpoint, name: str, documents: list[list[int]]
) -> list[tuple[int, ...]]:
    """Neighbouring passages of one length."""
    bos = checkpoint.special_tokens.bos if checkpoint.prepend_bos else None
    first = () if bos is None else (bos,)
    eos = checkpoint.special_tokens.eos if checkpoint.append_eos else None
    last = () if eos is None else (eos,)
    length = min(checkpoint.config.context, PASSAGE_TOKENS) - len(first) - len(last)
    windows = [
        (*first, *ids[start : start + length], *last)
        for ids in documents
        for start in range(0, len(ids) - length + 1, length)
    ]
    if not windows:
        raise ExportError(f"{name} has fewer than {length} tokens")
    return windows


def _spread(windows: list[tuple[int, ...]], number: int) -> list[Passage]:
    """Evenly spread over all documents: adjacent windows are alike."""
    return [Passage(ids) for ids in windows[:: max(1, len(windows) // number)][:number]]


def _size(checkpoint: Checkpoint) -> int:
    """How many parameters it has."""
    entries = lazy(checkpoint.weights).entries.values()
    return sum(math.prod(entry.shape) for entry in entries)


def _pairs(
    checkpoint: Checkpoint, tokenizer: Tokenizer, name: str, pairs: Sequence[Pair]
) -> HeldOut:
    context = checkpoint.config.context
    tokens = [pair for pair in tokenize_pairs(pairs, tokenizer) if pair_fits(pair, context)]
    if not tokens:
        raise ExportError(f"{name} has no pair that fits a context of {context} tokens")
    special, start = pair_tokens(checkpoint.special_tokens), checkpoint.special_tokens.source_start
    passages = [
        Passage((special.bos, *pair.target, special.eos), (*start, *pair.source, special.eos))
        for pair in tokens[:NUM_PAIRS]
    ]
    return HeldOut(name, passages)


@torch.no_grad()
def _translated(checkpoint: Checkpoint, tokenizer: Tokenizer, documents: Sequence[str]) -> HeldOut:
    """Sentences, and what the model makes of them by greedy decoding."""
    special, model = pair_tokens(checkpoint.special_tokens), checkpoint.build()
    longest = min(checkpoint.config.context, PASSAGE_TOKENS) // 4
    greedy = SamplingParameters(
        temperature=0.0, max_new_tokens=longest, stop_ids=frozenset(checkpoint.stop_ids)
    )
    sentences = tokenizer.encode_all([line for text in documents for line in text.split(". ")])
    start = checkpoint.special_tokens.source_start
    fitting = [
        (*start, *ids, special.eos) for ids in sentences if longest // 4 < len(ids) < longest - 1
    ]
    if not fitting:
        raise ExportError(f"no sentence of sotu has up to {longest} tokens")
    passages = []
    for source in fitting[:: max(1, len(fitting) // NUM_SENTENCES)][:NUM_SENTENCES]:
        answer = generate(model, [special.bos], greedy, source_ids=source, cached=True)
        passages.append(Passage((special.bos, *answer.token_ids), source))
    return HeldOut("the model's own answers to sentences of sotu", passages)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExportError(f"can't read the text {path}: {error}") from error


@torch.no_grad()
def _sampled_from_the_model(
    checkpoint: Checkpoint, seed: int = SEED, num_passages: int = NUM_PASSAGES
) -> HeldOut:
    """Samples passages from the model, after bos, or else after random first tokens."""
    config = checkpoint.config
    generator = torch.Generator().manual_seed(seed)
    length = min(config.context, PASSAGE_TOKENS // 2)
    if config.family == "encoder" or _size(checkpoint) > MAX_SAMPLED:  # an encoder can't generate
        ids_BT = torch.randint(config.vocab_size, (num_passages, length), generator=generator)
        return HeldOut(_RANDOM, [Passage(tuple(ids)) for ids in ids_BT.tolist()])
    model = checkpoint.build()
    first_B1 = torch.randint(config.vocab_size, (num_passages, 1), generator=generator)
    if config.family == "causal" and checkpoint.special_tokens.bos is not None:
        first_B1.fill_(checkpoint.special_tokens.bos)
    cross, sources = None, [()] * num_passages
    if config.family == "seq2seq":
        source_BS = torch.randint(
            config.vocab_size, (num_passages, length // 2), generator=generator
        )
        cross = model.encode(source_BS, torch.ones_like(source_BS, dtype=torch.bool))
        sources = [tuple(ids) for ids in source_BS.tolist()]
    ids_BT = _sample(model, cross, first_B1, length, generator)
    passages = [
        Passage(tuple(ids), source) for ids, source in zip(ids_BT.tolist(), sources, strict=True)
    ]
    return HeldOut("sampled from the model", passages)


def _sample(
    model: Network,
    cross: CrossKeyValue | None,
    ids_BT: torch.Tensor,
    length: int,
    generator: torch.Generator,
) -> torch.Tensor:
    cache = model.cached(cross)
    while ids_BT.shape[1] < length:
        logits_BV = model.project(model.hidden(ids_BT[:, -1:], cache))[:, -1]
        next_B1 = torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)
        ids_BT = torch.cat((ids_BT, next_B1), dim=1)
    return ids_BT


def mask_passages(checkpoint: Checkpoint, text: HeldOut) -> list[MaskedText]:
    """Each passage with some tokens masked, always the same ones; with none if the model has no
    mask token."""
    special, masked = checkpoint.special_tokens, []
    if special.mask is None:
        first = (0,) if checkpoint.config.num_classes else ()  # its logits are of the whole text
        return [MaskedText(passage.ids, first, ()) for passage in text.passages]
    tokens = MaskingTokens(
        special.mask if special.bos is None else special.bos,
        special.mask if special.eos is None else special.eos,
        special.mask,
        checkpoint.config.vocab_size,
    )
    for number, passage in enumerate(text.passages):
        for turn in range(NUM_MASKS):
            generator = torch.Generator().manual_seed(mix(MASK_SEED, number, turn))
            batch = mask_tokens(torch.tensor([passage.ids]), tokens, generator)
            targets = batch.targets_BT[0].tolist()
            places = [place for place, target in enumerate(targets) if target != IGNORED]
            ids = tuple(batch.inputs_BT[0].tolist())
            masked.append(MaskedText(ids, tuple(places), tuple(targets[at] for at in places)))
    return masked
