"""Which tokens a training step sees: a pure function of (seed, step).

Nothing is carried from step to step, so a run that was killed and resumed, or shared between
processes, sees exactly what an uninterrupted one sees.

Knows: token ids, lengths, the seed. Does not know: text, devices, the network.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quill.model.errors import CorpusError
from quill.model.randomness import GAMMA, MAX_SEED, scramble

# B sequences · T tokens · S source tokens

IGNORED = -100  # a target that counts for nothing: padding


@dataclass(frozen=True)
class Batch:
    """Rows to learn from: after inputs[:, :t] comes targets[:, t]."""

    inputs_BT: Tensor
    targets_BT: Tensor
    source_BS: Tensor | None = None
    source_mask_BS: Tensor | None = None

    @property
    def num_targets(self) -> int:
        return int((self.targets_BT != IGNORED).sum())

    def micro_batch(self, index: int, num_micro_batches: int) -> "Batch":
        """Every num_micro_batches-th row, from row `index` on."""
        return self._changed(lambda tensor: tensor[index::num_micro_batches])

    def to(self, device: torch.device) -> "Batch":
        return self if device.type == "cpu" else self._changed(lambda tensor: tensor.to(device))

    def _changed(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        source, mask = (
            None if each is None else change(each) for each in (self.source_BS, self.source_mask_BS)
        )
        return Batch(change(self.inputs_BT), change(self.targets_BT), source, mask)


class Batches(Protocol):
    """Training data, cut into steps."""

    steps_per_epoch: int

    def batch(self, step: int) -> Batch: ...


class TextBatches:
    """Windows of one long stream of tokens. Each epoch cuts it elsewhere and shuffles anew."""

    def __init__(self, ids: Tensor, context: int, num_sequences: int, seed: int) -> None:
        self._ids = ids
        self._context = context
        self._num_sequences = num_sequences
        self._seed = seed
        # The cut moves by less than a window, so one window fewer always fits.
        self._num_windows = (len(ids) - 1) // context - 1
        self.steps_per_epoch = self._num_windows // num_sequences
        if self.steps_per_epoch < 1:
            raise CorpusError(
                f"the training text has {len(ids):,} tokens; a step of {num_sequences} sequences "
                f"of {context} tokens needs at least {(num_sequences + 1) * context + 1:,}. Give "
                "more text, or lower --batch-tokens or --context"
            )
        self._epoch = -1
        self._starts = torch.empty(0, dtype=torch.int64)

    def batch(self, step: int) -> Batch:
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._starts = epoch, self._shuffle(epoch)
        starts_B = self._starts[index * self._num_sequences : (index + 1) * self._num_sequences]
        rows_BT = self._ids[starts_B[:, None] + torch.arange(self._context + 1)].to(torch.int64)
        return Batch(rows_BT[:, :-1], rows_BT[:, 1:])

    def _shuffle(self, epoch: int) -> Tensor:
        generator = epoch_generator(self._seed, epoch)
        offset = torch.randint(0, self._context, (1,), generator=generator)
        return offset + torch.randperm(self._num_windows, generator=generator) * self._context


@dataclass(frozen=True)
class TokenPair:
    """A source and its target, as ids, without special tokens."""

    source: list[int]
    target: list[int]


class PairBatches:
    """Pairs of similar length together, so that little is padding; batches by token count.

    Pairs are sorted by length with random order among equals. Only the lengths decide where
    one batch ends, so every epoch has the same number of batches, in another order.
    """

    def __init__(
        self, pairs: list[TokenPair], batch_tokens: int, special: "PairTokens", seed: int
    ) -> None:
        if not pairs:
            raise CorpusError("there are no pairs to train on")
        self._pairs = pairs
        self._special = special
        self._seed = seed
        self._lengths = torch.tensor([_padded_length(pair) for pair in pairs])
        self._cuts = _cut(sorted(self._lengths.tolist()), batch_tokens)
        self.steps_per_epoch = len(self._cuts)
        self._epoch = -1
        self._batches: list[Tensor] = []

    def batch(self, step: int) -> Batch:
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._shuffle(epoch)
        return collate([self._pairs[i] for i in self._batches[index].tolist()], self._special)

    def _shuffle(self, epoch: int) -> list[Tensor]:
        generator = epoch_generator(self._seed, epoch)
        by_chance = torch.randperm(len(self._pairs), generator=generator)
        by_length = by_chance[self._lengths[by_chance].argsort(stable=True)]
        order = torch.randperm(len(self._cuts), generator=generator).tolist()
        return [by_length[slice(*self._cuts[i])] for i in order]


@dataclass(frozen=True)
class PairTokens:
    """The special tokens that frame a pair."""

    bos: int
    eos: int
    pad: int


def collate(pairs: list[TokenPair], special: PairTokens) -> Batch:
    """Sources end with eos; the decoder starts from bos and must end with eos."""
    source_BS = _pad([[*pair.source, special.eos] for pair in pairs], special.pad)
    return Batch(
        inputs_BT=_pad([[special.bos, *pair.target] for pair in pairs], special.pad),
        targets_BT=_pad([[*pair.target, special.eos] for pair in pairs], IGNORED),
        source_BS=source_BS,
        source_mask_BS=source_BS != special.pad,
    )


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(mix(seed, epoch))


def mix(*numbers: int) -> int:
    """One seed out of several numbers (SplitMix64's finaliser over each in turn)."""
    state = 0
    for number in numbers:
        state = scramble((state + number + GAMMA) & MAX_SEED)
    return state


def _padded_length(pair: TokenPair) -> int:
    return max(len(pair.source), len(pair.target)) + 1


def _cut(lengths: list[int], batch_tokens: int) -> list[tuple[int, int]]:
    """Where each batch begins and ends: rows times the longest row stays within the limit."""
    cuts, start = [], 0
    for end, length in enumerate(lengths):
        if end > start and (end - start + 1) * length > batch_tokens:
            cuts.append((start, end))
            start = end
    return [*cuts, (start, len(lengths))]


def _pad(rows: list[list[int]], filler: int) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows])
