"""A family's task in training: its batches, its score on held-out data, a sample to show.

Knows: how each family's data is prepared and judged.
Does not know: steps, optimizers, where data comes from (model/data/source.py).
"""

from typing import Protocol

import torch

from quill.model.data.batches import IGNORED, Batches, PairBatches, TextBatches
from quill.model.data.dataset import (
    PairData,
    TextData,
    encode_pairs,
    encode_text,
    fit_pair_tokenizer,
    fit_text_tokenizer,
)
from quill.model.data.dataset import Track as EncodeTrack
from quill.model.data.masking import MaskedBatches, MaskingTokens, framed, mask_tokens
from quill.model.data.source import DataSource
from quill.model.data.splits import PairCorpus, TextCorpus
from quill.model.data.tokenizer import CAUSAL_SPECIAL_TOKENS, ENCODER_SPECIAL_TOKENS, Tokenizer
from quill.model.errors import ConfigError
from quill.model.network.config import ModelConfig
from quill.model.network.network import Network
from quill.model.network.transformer import Transformer
from quill.model.reference.generate import generate
from quill.model.reference.sampling import SamplingParameters
from quill.model.training.recipes import Recipe
from quill.model.training.scoring import (
    SCORE_ROWS,
    Score,
    Track,
    pair_batches,
    score_masked,
    score_text,
    total_loss,
)

NUM_PROMPT_TOKENS = 24
NUM_SAMPLE_TOKENS = 80
NUM_SAMPLE_PAIRS = 3
NUM_QUICK_WINDOWS = 64  # of held-out text, while training goes on


class Task(Protocol):
    """The interface between the training loop and its data."""

    tokenizer: Tokenizer
    fingerprint: str

    def batches(self, recipe: Recipe) -> Batches: ...

    def describe(self) -> str: ...

    def score(
        self, model: Network, device: torch.device, quick: bool, track: Track = iter
    ) -> Score:
        """How well held-out data is predicted; quick looks at a sample of it."""

    def sample(self, model: Network, seed: int) -> str:
        """Something to look at: what the network writes now."""


class TextTask:
    """Running text for a causal model."""

    def __init__(
        self,
        corpus: TextCorpus,
        tokenizer: Tokenizer,
        context: int,
        track: EncodeTrack = iter,
    ) -> None:
        self.tokenizer = tokenizer
        self.fingerprint = corpus.fingerprint()
        self._data: TextData = encode_text(corpus, tokenizer, track)
        self._context = context

    def batches(self, recipe: Recipe) -> Batches:
        num_sequences = max(recipe.batch_tokens // self._context, 1)
        return TextBatches(self._data.train_ids, self._context, num_sequences, recipe.seed)

    def describe(self) -> str:
        num_train, num_held_out = len(self._data.train_ids), len(self._data.held_out_ids)
        return f"{num_train:,} training tokens, {num_held_out:,} held out"

    def score(
        self, model: Network, device: torch.device, quick: bool, track: Track = iter
    ) -> Score:
        ids = self._data.held_out_ids
        sparse = max(self._context, len(ids) // NUM_QUICK_WINDOWS)
        stride = sparse if quick else max(self._context // 2, 1)
        return score_text(model, ids, self._data.num_held_out_bytes, device, stride, track)

    def sample(self, model: Network, seed: int) -> str:
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


class MaskedTask(TextTask):
    """Running text with hidden tokens for an encoder."""

    def __init__(
        self,
        corpus: TextCorpus,
        tokenizer: Tokenizer,
        context: int,
        track: EncodeTrack = iter,
    ) -> None:
        super().__init__(corpus, tokenizer, context, track)
        self._marks = MaskingTokens.of(tokenizer.special, tokenizer.vocab_size)
        if context <= self._marks.num_around:
            raise ConfigError(f"--context is {context}; [CLS] and [SEP] leave no space for a text")

    def batches(self, recipe: Recipe) -> Batches:
        length = self._context - self._marks.num_around
        num_sequences = max(recipe.batch_tokens // self._context, 1)
        windows = TextBatches(self._data.train_ids, length, num_sequences, recipe.seed)
        return MaskedBatches(windows, self._marks, recipe.seed)

    def score(
        self, model: Network, device: torch.device, quick: bool, track: Track = iter
    ) -> Score:
        ids, length = self._data.held_out_ids, self._context - self._marks.num_around
        stride = max(length, len(ids) // NUM_QUICK_WINDOWS) if quick else length
        return score_masked(model, ids, self._marks, device, stride, track)

    @torch.no_grad()
    def sample(self, model: Network, seed: int) -> str:
        """The beginning of the held-out text, with what the network finds in hidden places."""
        assert isinstance(model, Transformer)
        ids = self._data.held_out_ids[: min(NUM_SAMPLE_TOKENS, self._context - 2)].to(torch.int64)
        batch = mask_tokens(
            framed(ids[None], self._marks), self._marks, torch.Generator().manual_seed(seed)
        )
        hidden = batch.targets_BT[0] != IGNORED
        found = model.project(model.hidden_states(batch.inputs_BT)).argmax(dim=-1)[0]
        parts = []
        for token, guess, target in zip(
            batch.inputs_BT[0].tolist(), found.tolist(), batch.targets_BT[0].tolist(), strict=True
        ):
            if target == IGNORED:
                parts.append(self.tokenizer.decode([token], skip_special=True))
            else:
                words = (self.tokenizer.decode([each]) for each in (guess, target))
                parts.append("⟨{}|{}⟩".format(*words))
        right = int((found == batch.targets_BT[0]).sum())
        return f"⟨found|hidden⟩, {right} of {int(hidden.sum())}: " + "".join(parts)


class PairTask:
    """Sources and targets for a seq2seq model."""

    def __init__(
        self,
        corpus: PairCorpus,
        tokenizer: Tokenizer,
        context: int,
        track: EncodeTrack = iter,
    ) -> None:
        self.tokenizer = tokenizer
        self.fingerprint = corpus.fingerprint()
        self._data: PairData = encode_pairs(corpus, tokenizer, context, track)
        self._num_bytes = sum(len(pair.target.encode()) for pair in corpus.held_out)

    def batches(self, recipe: Recipe) -> Batches:
        return PairBatches(self._data.train, recipe.batch_tokens, self._data.special, recipe.seed)

    def describe(self) -> str:
        dropped = f", {self._data.num_dropped} too long" if self._data.num_dropped else ""
        num_train, num_held_out = len(self._data.train), len(self._data.held_out)
        return f"{num_train:,} training pairs, {num_held_out:,} held out{dropped}"

    def score(
        self, model: Network, device: torch.device, quick: bool, track: Track = iter
    ) -> Score:
        batches = pair_batches(self._data.held_out, self._data.special, SCORE_ROWS)
        loss = total_loss(model, track(batches), device)
        return Score(loss.nats, loss.num_tokens, self._num_bytes)

    def sample(self, model: Network, seed: int) -> str:
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


def load_task(
    config: ModelConfig,
    source: DataSource,
    tokenizer: Tokenizer | None = None,
    track: EncodeTrack = iter,
) -> Task:
    """Reads the corpus, trains a tokenizer unless one is given, encodes everything."""
    if config.family != "seq2seq":
        text, is_causal = source.load_text(), config.family == "causal"
        special = CAUSAL_SPECIAL_TOKENS if is_causal else ENCODER_SPECIAL_TOKENS
        tokenizer = tokenizer or fit_text_tokenizer(text, config.vocab_size, special)
        return (TextTask if is_causal else MaskedTask)(text, tokenizer, config.context, track)
    pairs = source.load_pairs()
    tokenizer = tokenizer or fit_pair_tokenizer(pairs, config.vocab_size)
    return PairTask(pairs, tokenizer, config.context, track)
