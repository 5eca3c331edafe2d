"""What a run trains on, ready to use: tokenizer, batches, held-out score, a sample to show.

Knows: how each family's data is prepared and judged. Does not know: steps, optimisers, files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from model.batches import Batches, PairBatches, TextBatches
from model.config import Family, ModelConfig
from model.corpora import (
    PAIR_CORPORA,
    TEXT_CORPORA,
    load_pairs,
    load_pairs_file,
    load_text,
    load_text_files,
)
from model.dataset import (
    PairData,
    TextData,
    encode_pairs,
    encode_text,
    fingerprint,
    fit_pair_tokenizer,
    fit_text_tokenizer,
)
from model.errors import ConfigError
from model.recipes import Recipe
from model.reference import generate
from model.sampling import SamplingParameters
from model.scoring import SCORE_ROWS, Score, Track, pair_batches, score_text, total_loss
from model.splits import PairCorpus, TextCorpus
from model.tokenizer import Tokenizer
from model.transformer import Transformer

NUM_PROMPT_TOKENS = 24
NUM_SAMPLE_TOKENS = 80
NUM_SAMPLE_PAIRS = 3
NUM_QUICK_WINDOWS = 64  # of held-out text, while training goes on


@dataclass(frozen=True)
class DataSource:
    """Where the data comes from: a named corpus, or the user's own files."""

    corpus: str | None = None
    files: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"corpus": self.corpus, "files": list(self.files)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DataSource":
        return cls(corpus=values["corpus"], files=tuple(values["files"]))

    def load_text(self) -> TextCorpus:
        if self.corpus is not None:
            return load_text(self.corpus)
        return load_text_files([Path(file) for file in self.files])

    def load_pairs(self) -> PairCorpus:
        if self.corpus is not None:
            return load_pairs(self.corpus)
        return load_pairs_file(Path(self.files[0]))


def choose_source(
    family: Family, corpus: str | None, text: Sequence[Path] | None, pairs: Path | None
) -> DataSource:
    """The user's own files, the named corpus, or the family's default."""
    if sum((bool(text), pairs is not None, corpus is not None)) > 1:
        raise ConfigError("--corpus, --text and --pairs exclude each other: give one")
    if family == "causal":
        if pairs is not None or corpus in PAIR_CORPORA:
            raise ConfigError("a causal model reads text, not pairs: use --text or --corpus sotu")
        return DataSource(files=tuple(map(str, text))) if text else DataSource(corpus or "sotu")
    if text or corpus in TEXT_CORPORA:
        raise ConfigError("a seq2seq model reads pairs: use --pairs or --corpus en-de")
    return DataSource(files=(str(pairs),)) if pairs else DataSource(corpus or "en-de")


class Material(Protocol):
    """Everything the training loop asks of data."""

    tokenizer: Tokenizer
    fingerprint: str

    def batches(self, recipe: Recipe) -> Batches: ...

    def describe(self) -> str: ...

    def score(
        self, model: Transformer, device: torch.device, quick: bool, track: Track = iter
    ) -> Score:
        """How well held-out data is predicted; quick looks at a sample of it."""

    def sample(self, model: Transformer, seed: int) -> str:
        """Something to look at: what the network writes now."""


class TextMaterial:
    """Running text for a causal model."""

    def __init__(self, corpus: TextCorpus, tokenizer: Tokenizer, context: int) -> None:
        self.tokenizer = tokenizer
        self.fingerprint = fingerprint([*corpus.train, "", *corpus.held_out])
        self._data: TextData = encode_text(corpus, tokenizer)
        self._context = context

    def batches(self, recipe: Recipe) -> Batches:
        num_rows = max(recipe.batch_tokens // self._context, 1)
        return TextBatches(self._data.train_ids, self._context, num_rows, recipe.seed)

    def describe(self) -> str:
        num_train, num_held_out = len(self._data.train_ids), len(self._data.held_out_ids)
        return f"{num_train:,} training tokens, {num_held_out:,} held out"

    def score(
        self, model: Transformer, device: torch.device, quick: bool, track: Track = iter
    ) -> Score:
        ids = self._data.held_out_ids
        sparse = max(self._context, len(ids) // NUM_QUICK_WINDOWS)
        stride = sparse if quick else max(self._context // 2, 1)
        return score_text(model, ids, self._data.num_held_out_bytes, device, stride, track)

    def sample(self, model: Transformer, seed: int) -> str:
        """Continues the beginning of the held-out text."""
        prompt = self._data.held_out_ids[: min(NUM_PROMPT_TOKENS, self._context // 2)].tolist()
        parameters = SamplingParameters(
            temperature=0.7, top_p=0.95, max_new_tokens=NUM_SAMPLE_TOKENS
        )
        answer = generate(model, prompt, parameters, seed, cached=True)
        texts = (
            self.tokenizer.decode(ids, skip_special=True) for ids in (prompt, answer.token_ids)
        )
        return " ▸".join(texts)


class PairMaterial:
    """Sources and targets for a seq2seq model."""

    def __init__(self, corpus: PairCorpus, tokenizer: Tokenizer, context: int) -> None:
        self.tokenizer = tokenizer
        pairs = [*corpus.train, *corpus.held_out, *corpus.test]
        self.fingerprint = fingerprint(text for pair in pairs for text in pair)
        self._data: PairData = encode_pairs(corpus, tokenizer, context)
        self._num_bytes = sum(len(pair.target.encode()) for pair in corpus.held_out)

    def batches(self, recipe: Recipe) -> Batches:
        return PairBatches(self._data.train, recipe.batch_tokens, self._data.special, recipe.seed)

    def describe(self) -> str:
        dropped = f", {self._data.num_dropped} too long" if self._data.num_dropped else ""
        num_train, num_held_out = len(self._data.train), len(self._data.held_out)
        return f"{num_train:,} training pairs, {num_held_out:,} held out{dropped}"

    def score(
        self, model: Transformer, device: torch.device, quick: bool, track: Track = iter
    ) -> Score:
        batches = pair_batches(self._data.held_out, self._data.special, SCORE_ROWS)
        loss = total_loss(model, track(batches), device)
        return Score(loss.nats, loss.num_tokens, self._num_bytes)

    def sample(self, model: Transformer, seed: int) -> str:
        special = self._data.special
        parameters = SamplingParameters(
            temperature=0.0, max_new_tokens=NUM_SAMPLE_TOKENS, stop_ids=frozenset({special.eos})
        )
        lines = []
        for pair in self._data.held_out[:NUM_SAMPLE_PAIRS]:
            source = [*pair.source, special.eos]
            answer = generate(model, [special.bos], parameters, source_ids=source, cached=True)
            target = self.tokenizer.decode(answer.token_ids, skip_special=True)
            lines.append(f"{self.tokenizer.decode(pair.source)} → {target}")
        return "\n".join(lines)


def load_material(
    config: ModelConfig, source: DataSource, tokenizer: Tokenizer | None = None
) -> Material:
    """Reads the corpus, trains a tokenizer unless one is given, encodes everything."""
    if config.family == "causal":
        text = source.load_text()
        tokenizer = tokenizer or fit_text_tokenizer(text, config.vocab_size)
        return TextMaterial(text, tokenizer, config.context)
    pairs = source.load_pairs()
    tokenizer = tokenizer or fit_pair_tokenizer(pairs, config.vocab_size)
    return PairMaterial(pairs, tokenizer, config.context)
