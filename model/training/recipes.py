"""How a network is trained: one frozen value, and a recipe for each preset.

Knows: which numbers exist, which go together, which suit each preset.
Does not know: data, devices, how a step is computed.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from quill.model.errors import ConfigError

Schedule = Literal["cosine", "inverse_sqrt"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the weights, apart from the shape and the data."""

    num_steps: int
    batch_tokens: int  # of one step, over all processes
    num_micro_batches: int = 1  # parts of a batch, to save memory or to share the work
    learning_rate: float  # the peak
    schedule: Schedule = "cosine"
    warmup_steps: int
    final_fraction: float = 0.02  # cosine ends at this part of the peak
    beta1: float = 0.9
    beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.1  # on matrices only
    max_gradient_norm: float = 1.0
    label_smoothing: float = 0.0
    balance_rate: float = 1e-3  # how fast experts that have too many tokens become less likely
    seed: int = 0
    evaluate_every: int = 250
    save_every: int = 500
    keep_checkpoints: int = 1

    def __post_init__(self) -> None:
        counts = ("num_steps", "batch_tokens", "num_micro_batches", "evaluate_every", "save_every")
        for name in (*counts, "keep_checkpoints"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("learning_rate", "adam_eps"):
            self._require(name, 0 < getattr(self, name) < math.inf, "a positive number")
        for name in ("warmup_steps", "balance_rate", "weight_decay"):
            self._require(name, 0 <= getattr(self, name) < math.inf, "at least 0")
        for name in ("beta1", "beta2", "label_smoothing"):
            self._require(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        self._require("final_fraction", 0 <= self.final_fraction <= 1, "from 0 to 1")
        self._require("max_gradient_norm", self.max_gradient_norm > 0, "a positive number")
        self._require("seed", 0 <= self.seed < 2**63, "from 0 to 2**63 - 1")
        self._require("schedule", self.schedule in ("cosine", "inverse_sqrt"), "a known schedule")

    def _require(self, name: str, allowed: bool, rule: str) -> None:
        if not allowed:
            raise ConfigError(f"{name} is {getattr(self, name)}; it must be {rule}")

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "inverse_sqrt":
            # The paper's formula, with the peak as the learning rate.
            return self.learning_rate * math.sqrt(max(self.warmup_steps, 1) / (step + 1))
        remaining = max(self.num_steps - self.warmup_steps, 1)
        turn = math.pi * (step - self.warmup_steps) / remaining
        fraction = self.final_fraction + (1 - self.final_fraction) * 0.5 * (1 + math.cos(turn))
        return self.learning_rate * fraction


def paper_learning_rate(d_model: int, warmup_steps: int) -> float:
    """The peak of the paper's schedule (section 5.3): d_model^-0.5 · warmup^-0.5."""
    return float((d_model * warmup_steps) ** -0.5)


def _paper(num_steps: int, d_model: int) -> Recipe:
    return Recipe(
        num_steps=num_steps,
        batch_tokens=25_000,
        learning_rate=paper_learning_rate(d_model, 4000),
        schedule="inverse_sqrt",
        warmup_steps=4000,
        beta2=0.98,
        adam_eps=1e-9,
        weight_decay=0.0,
        label_smoothing=0.1,
        evaluate_every=1000,
        save_every=1000,
        keep_checkpoints=5,
    )


def _pretraining(batch_tokens: int, learning_rate: float) -> Recipe:
    return Recipe(
        num_steps=100_000,
        batch_tokens=batch_tokens,
        learning_rate=learning_rate,
        warmup_steps=2000,
        evaluate_every=1000,
        save_every=1000,
    )


def _translation(learning_rate: float, num_steps: int) -> Recipe:
    """Recurrent networks take as long as `seq2seq-tiny`. A step of 1,000 tokens costs it 0.66 s of
    one busy core of an EPYC, a plain network 0.2 s, a GRU or an LSTM with attention 0.36 s."""
    return Recipe(
        num_steps=num_steps,
        batch_tokens=1024,
        learning_rate=learning_rate,
        warmup_steps=300,
        beta2=0.98,
        weight_decay=0.01,
        label_smoothing=0.1,
        evaluate_every=400,
        save_every=400,
    )


_TINY = Recipe(
    num_steps=1200,
    batch_tokens=1024,
    learning_rate=3e-3,
    warmup_steps=60,
    evaluate_every=200,
    save_every=400,
)

RECIPES: dict[str, Recipe] = {
    "tiny": _TINY,
    "moe-tiny": _TINY,
    "mla-tiny": _TINY,
    "small": _pretraining(batch_tokens=491_520, learning_rate=6e-4),
    "llama-smollm2-135m": _pretraining(batch_tokens=524_288, learning_rate=3e-3),
    "seq2seq-tiny": _translation(1.2e-3, 2800),
    "bert-tiny": replace(
        _TINY, num_steps=5000, warmup_steps=250, evaluate_every=500, save_every=250
    ),
    "rnn-fixed-tiny": _translation(1e-3, 9000),
    "gru-bahdanau-tiny": _translation(2e-3, 5000),
    "lstm-bahdanau-tiny": _translation(2e-3, 5000),
    "transformer-base": _paper(100_000, 512),
    "transformer-big": _paper(300_000, 1024),
}
