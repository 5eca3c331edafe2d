"""`quill eval`: how good a checkpoint is on text that it wasn't trained on.

Knows: the arguments and the report. Does not know: how scores are computed.
"""

import argparse
import os
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table

from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.checkpoint.run_directory import source_of
from quill.model.data.dataset import encode_stream
from quill.model.data.masking import MaskingTokens
from quill.model.data.source import DataSource, choose_source
from quill.model.data.splits import Pair, PairCorpus
from quill.model.data.tokenizer import Tokenizer
from quill.model.errors import ConfigError, CorpusError
from quill.model.evaluation.translation import Evaluation, evaluate_translation, write_answers
from quill.model.importers.import_weights import open_checkpoint
from quill.model.progress import track
from quill.model.training.distributed import choose_device
from quill.model.training.scoring import Score, score_masked, score_text

NUM_EXAMPLES = 5


def run(args: argparse.Namespace) -> None:
    checkpoint = open_checkpoint(args.checkpoint)
    if checkpoint.tokenizer is None:
        raise ConfigError(f"{args.checkpoint} has no tokenizer; text can't be scored with it")
    match checkpoint.config.family:
        case "causal":
            _evaluate_text(args, checkpoint, checkpoint.tokenizer)
        case "encoder":
            _evaluate_masked(args, checkpoint, checkpoint.tokenizer)
        case "seq2seq":
            _evaluate_pairs(args, checkpoint, checkpoint.tokenizer)


def _source(args: argparse.Namespace, checkpoint: Checkpoint) -> DataSource:
    """The given data; by default the data of the training run, whose held-out part is scored."""
    given = args.corpus or args.text or args.pairs
    trained_on = None if given else source_of(checkpoint)
    family = checkpoint.config.family
    return trained_on or choose_source(family, args.corpus, args.text, args.pairs)


def _evaluate_text(args: argparse.Namespace, checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    source = _source(args, checkpoint)
    texts = source.load_text().held_out
    half = max(checkpoint.config.context // 2, 1)
    stride = half if args.stride is None else args.stride
    if not 1 <= stride <= checkpoint.config.context:
        raise ConfigError(
            f"--stride is {stride}; it must be from 1 to the context, {checkpoint.config.context}"
        )
    ids = encode_stream(texts, tokenizer)
    if len(ids) < 2:
        raise CorpusError("there is too little text to score: at least two tokens are needed")
    device = choose_device(args.device)
    model = checkpoint.build().to(device)
    num_bytes = sum(len(text.encode()) for text in texts)
    score = score_text(model, ids, num_bytes, device, stride, track)
    _show_score(score, "tokens", "bits per byte", f"{score.bits_per_byte:.4f}")


def _evaluate_masked(
    args: argparse.Namespace, checkpoint: Checkpoint, tokenizer: Tokenizer
) -> None:
    if checkpoint.special_tokens.mask is None:
        raise ConfigError(
            "this encoder has no head that finds masked tokens, so there is nothing to score"
        )
    if args.stride is not None:
        raise ConfigError("--stride is for language models; an encoder's windows don't overlap")
    marks = MaskingTokens.of(checkpoint.special_tokens, checkpoint.config.vocab_size)
    ids = encode_stream(_source(args, checkpoint).load_text().held_out, tokenizer)
    if not len(ids):
        raise CorpusError("there is too little text to score: at least one token is needed")
    device, stride = choose_device(args.device), checkpoint.config.context - marks.num_around
    score = score_masked(checkpoint.build().to(device), ids, marks, device, stride, track)
    _show_score(score, "hidden tokens", "found", f"{score.accuracy:.2%}")


def _show_score(score: Score, counted: str, measure: str, result: str) -> None:
    table = Table(counted, "loss", "perplexity", measure)
    table.add_row(f"{score.num_tokens:,}", f"{score.loss:.4f}", f"{score.perplexity:.3f}", result)
    Console().print(table)


def _evaluate_pairs(args: argparse.Namespace, checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    source = _source(args, checkpoint)
    pairs = _part(source.load_pairs(), args.part)[: args.limit]
    if not pairs:
        raise CorpusError("there are no pairs to score")
    with _open_answers(args.answers) as file:  # before minutes of work, not after
        model = checkpoint.build().to(choose_device(args.device))
        found = evaluate_translation(model, tokenizer, pairs, args.beams)
        _show_translations(pairs, found)
        write_answers(file, model, tokenizer, pairs, found)


def _open_answers(path: Path | None) -> TextIO:
    try:
        return Path(path or os.devnull).open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--answers {path} can't be written: {error.strerror}") from error


def _show_translations(pairs: list[Pair], found: Evaluation) -> None:
    console = Console(highlight=False, soft_wrap=True)
    examples = Table("source", "translation", "reference", title="Examples")
    greedy = found.translations["greedy"]
    for pair, translation in list(zip(pairs, greedy, strict=True))[:NUM_EXAMPLES]:
        examples.add_row(pair.source, translation.text, pair.target)
    console.print(examples, markup=False)
    table = Table("", "BLEU", "chrF", title=f"{len(pairs)} pairs")
    for score in found.scores:
        table.add_row(score.name, f"{score.bleu:.1f}", f"{score.chrf:.1f}")
    console.print(table)


def _part(corpus: PairCorpus, name: str) -> list[Pair]:
    return corpus.test if name == "test" else corpus.held_out
