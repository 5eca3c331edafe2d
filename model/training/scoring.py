"""How well a network predicts held-out text or pairs: losses, bits per byte.

Knows: windows and their overlap, what a bit is. Does not know: files, commands, translation.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quill.model.data.batches import IGNORED, Batch, PairTokens, TokenPair, collate, mix
from quill.model.data.masking import MaskingTokens, framed, mask_tokens
from quill.model.network.network import Network
from quill.model.training.loss import predict

# B sequences · T tokens · V vocabulary

SCORE_ROWS = 16
HELD_OUT_SEED = 15  # hides the same tokens of held-out text for every network

Track = Callable[[list[Batch]], Iterable[Batch]]  # watches batches go by; may raise to end it


@dataclass(frozen=True)
class Score:
    """A sum of losses over tokens, and how many bytes of text they stand for."""

    nats: float
    num_tokens: int
    num_bytes: float | None  # None: of hidden tokens, which stand for no text
    accuracy: float | None = None  # the share of hidden tokens that were found

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        return None if self.num_bytes is None else self.nats / math.log(2) / self.num_bytes


@dataclass(frozen=True)
class Loss:
    """A sum of losses, in nats, over so many tokens, and how many of them were the likeliest."""

    nats: float
    num_tokens: int
    num_right: int


@torch.no_grad()
def total_loss(model: Network, batches: Iterable[Batch], device: torch.device) -> Loss:
    """The cross-entropy of every target that counts."""
    nats, num_tokens, num_right = 0.0, 0, 0
    for batch in batches:
        logits_NV, targets_N = predict(model, batch.to(device))
        loss = F.cross_entropy(logits_NV.float(), targets_N, ignore_index=IGNORED, reduction="sum")
        nats += loss.item()
        num_tokens += batch.num_targets
        num_right += int((logits_NV.argmax(dim=1) == targets_N).sum())
    return Loss(nats, num_tokens, num_right)


def text_batches(ids: Tensor, context: int, stride: int, num_sequences: int) -> list[Batch]:
    """Windows over one stream, a stride apart. Each token counts once at the most.

    With a stride below the context windows overlap, and what an earlier window has counted
    isn't counted again: then every token but the first few has at least context - stride
    tokens of past. With a stride above the context the windows are a sample.
    """
    overlap = max(context - stride, 0)
    inputs, targets = [], []
    for start in range(0, len(ids) - 1, stride):
        window = ids[start : start + context + 1].to(torch.int64)
        target_T = window[1:].clone()
        if start > 0:
            target_T[:overlap] = IGNORED
        padding = context - len(target_T)
        inputs.append(F.pad(window[:-1], (0, padding)))
        targets.append(F.pad(target_T, (0, padding), value=IGNORED))
        if start + context >= len(ids) - 1:
            break
    return [
        Batch(
            torch.stack(inputs[row : row + num_sequences]),
            torch.stack(targets[row : row + num_sequences]),
        )
        for row in range(0, len(inputs), num_sequences)
    ]


def pair_batches(pairs: list[TokenPair], special: PairTokens, num_sequences: int) -> list[Batch]:
    ordered = sorted(pairs, key=lambda pair: (len(pair.source), len(pair.target)))
    size = num_sequences
    return [collate(ordered[at : at + size], special) for at in range(0, len(ordered), size)]


def score_text(
    model: Network,
    ids: Tensor,
    num_bytes: int,
    device: torch.device,
    stride: int,
    track: Track = iter,
) -> Score:
    batches = text_batches(ids, model.config.context, stride, SCORE_ROWS)
    loss = total_loss(model, track(batches), device)
    share = loss.num_tokens / (len(ids) - 1)
    return Score(loss.nats, loss.num_tokens, num_bytes * share)


def masked_batches(
    ids: Tensor, marks: MaskingTokens, context: int, stride: int, num_sequences: int
) -> list[Batch]:
    """Windows over one stream, a stride apart, with the same tokens hidden at every call."""
    length = min(context - marks.num_around, len(ids))
    starts_B = torch.arange(0, len(ids) - length + 1, stride)
    rows_BT = ids[starts_B[:, None] + torch.arange(length)].to(torch.int64)
    return [
        mask_tokens(
            framed(rows_BT[row : row + num_sequences], marks),
            marks,
            torch.Generator().manual_seed(mix(HELD_OUT_SEED, row)),
        )
        for row in range(0, len(rows_BT), num_sequences)
    ]


def score_masked(
    model: Network,
    ids: Tensor,
    marks: MaskingTokens,
    device: torch.device,
    stride: int,
    track: Track = iter,
) -> Score:
    """How well an encoder finds hidden tokens."""
    batches = masked_batches(ids, marks, model.config.context, stride, SCORE_ROWS)
    loss = total_loss(model, track(batches), device)
    return Score(loss.nats, loss.num_tokens, None, loss.num_right / max(loss.num_tokens, 1))
