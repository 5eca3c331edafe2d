"""Which tokens an encoder must find: a pure function of (seed, step), as all that training sees.

Knows: BERT's rule (15% are chosen; of these 80% are masked, 10% are exchanged, 10% stay).
Does not know: text, the network, where the windows come from.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quill.model.data.batches import IGNORED, Batch, Batches, mix
from quill.model.data.tokenizer import SpecialTokens
from quill.model.errors import CorpusError

# B sequences · T tokens

SHARE = 0.15
MASKED, EXCHANGED = 0.8, 0.1  # of the chosen
CUTS = (1, 2, 3, 6)  # a step's windows are cut into so many texts: short ones are to be read, too
MASKS = 1  # separates these random numbers from those of windows


@dataclass(frozen=True)
class MaskingTokens:
    """The special tokens around a text and inside it, and how many tokens there are."""

    first: int
    last: int
    mask: int
    vocab_size: int

    @classmethod
    def of(cls, special: SpecialTokens, vocab_size: int) -> "MaskingTokens":
        if special.bos is None or special.eos is None or special.mask is None:
            raise CorpusError(
                "this tokenizer has no [CLS], [SEP] and [MASK]; an encoder needs all three"
            )
        return cls(special.bos, special.eos, special.mask, vocab_size)

    @property
    def num_around(self) -> int:
        return 2


class MaskedBatches:
    """Windows of a stream with some of their tokens hidden; these are the targets."""

    def __init__(self, windows: Batches, marks: MaskingTokens, seed: int) -> None:
        self._windows = windows
        self._marks = marks
        self._seed = seed
        self.steps_per_epoch = windows.steps_per_epoch

    def batch(self, step: int) -> Batch:
        generator = torch.Generator().manual_seed(mix(self._seed, step, MASKS))
        cut = CUTS[int(torch.randint(len(CUTS), (1,), generator=generator))]
        rows_BT = _cut(self._windows.batch(step).inputs_BT, cut)
        return mask_tokens(framed(rows_BT, self._marks), self._marks, generator)


def _cut(rows_BT: Tensor, num_parts: int) -> Tensor:
    """Each row as several shorter ones."""
    length = rows_BT.shape[1] // num_parts
    if length == 0:
        return rows_BT
    return rows_BT[:, : num_parts * length].reshape(-1, length)


def framed(rows_BT: Tensor, marks: MaskingTokens) -> Tensor:
    first_B1 = torch.full_like(rows_BT[:, :1], marks.first)
    return torch.cat((first_B1, rows_BT, torch.full_like(first_B1, marks.last)), dim=1)


def mask_tokens(ids_BT: Tensor, marks: MaskingTokens, generator: torch.Generator) -> Batch:
    """The texts with some tokens hidden. In each at least one is chosen, and never a mark."""
    is_mark_BT = (ids_BT == marks.first) | (ids_BT == marks.last) | (ids_BT == marks.mask)
    draw_BT = torch.rand(ids_BT.shape, generator=generator).masked_fill(is_mark_BT, 2.0)
    least_B1 = draw_BT.amin(dim=1, keepdim=True)
    chosen_BT = ((draw_BT < SHARE) | (draw_BT == least_B1)) & ~is_mark_BT
    fate_BT = torch.rand(ids_BT.shape, generator=generator)
    others_BT = torch.randint(marks.vocab_size, ids_BT.shape, generator=generator)
    inputs_BT = ids_BT.masked_fill(chosen_BT & (fate_BT < MASKED), marks.mask)
    exchanged_BT = chosen_BT & (fate_BT >= MASKED) & (fate_BT < MASKED + EXCHANGED)
    inputs_BT = torch.where(exchanged_BT, others_BT, inputs_BT)
    return Batch(inputs_BT, ids_BT.masked_fill(~chosen_BT, IGNORED))
