"""What PyTorch answers: the truth that graphs are compared with.

Knows: the network in float32, how surprised it is by a text.
Does not know: ONNX, tolerances.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quill.export.verify.held_out import Passage
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.network.attention import CrossKeyValue

# T tokens · V vocabulary

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Surprise:
    """How well tokens were foreseen: the negative log-likelihood of each, and the favourites."""

    nll: Array  # one for each token that was foretold
    favourites: Array  # the most likely token at the same positions

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nll.mean()))


def surprise(logits_TV: Array, ids: Sequence[int]) -> Surprise:
    """`logits_TV` are those after each token; the last one's have nothing to foretell."""
    return foretold(logits_TV[: len(ids) - 1], ids[1:])


def foretold(logits_TV: Array, ids: Sequence[int]) -> Surprise:
    """Of each token by the logits in its place."""
    favourites_T = logits_TV.argmax(axis=1)
    places_T = np.arange(len(ids))
    top_T = logits_TV[places_T, favourites_T].astype(np.float64)
    said_T = logits_TV[places_T, list(ids)].astype(np.float64)
    # In single precision, summed in double: 2.6 times as fast, and off by 2e-8 (measured).
    shares_TV = np.exp(logits_TV - logits_TV[places_T, favourites_T, None])
    log_sum_T = top_T + np.log(shares_TV.sum(axis=1, dtype=np.float64))
    return Surprise(nll=log_sum_T - said_T, favourites=favourites_T)


def joined(parts: Sequence[Surprise]) -> Surprise:
    return Surprise(
        nll=np.concatenate([part.nll for part in parts]),
        favourites=np.concatenate([part.favourites for part in parts]),
    )


@dataclass(frozen=True)
class Answer:
    """PyTorch's logits after each token of a passage, and the keys and values it looked at."""

    passage: Passage
    logits_TV: Array
    hidden_TD: Array
    caches: list[Array]  # key 0, value 0, key 1, … as (kv_heads, length, head_size)
    cross_caches: list[Array]  # the same for the source; empty for causal


class Oracle:
    """The checkpoint's network, run plainly."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._model = checkpoint.build()

    @torch.no_grad()
    def answer(self, passage: Passage) -> Answer:
        cross = self._encode(passage)
        attending = self._model.cached(cross)
        hidden_1TD = self._model.hidden(_row(passage.ids), attending)
        logits_1TV = self._model.project(hidden_1TD)
        layers = [attending.key_value(i) for i in range(self._model.config.num_layers)]
        parked = [] if cross is None else cross.layers
        return Answer(
            passage=passage,
            logits_TV=logits_1TV[0].numpy(),
            hidden_TD=hidden_1TD[0].numpy(),
            caches=[side[0].numpy() for pair in layers for side in pair],
            cross_caches=[side[0].numpy() for pair in parked for side in pair],
        )

    @torch.no_grad()
    def surprise(self, passage: Passage) -> Surprise:
        logits_1TV = self._model(_row(passage.ids), self._encode(passage))
        return surprise(logits_1TV[0].numpy(), passage.ids)

    @torch.no_grad()
    def greedy(self, passage: Passage, num_steps: int) -> Passage:
        """The passage with so many more tokens, each the most likely one."""
        attending = self._model.cached(self._encode(passage))
        ids, new = list(passage.ids), list(passage.ids)
        for _ in range(num_steps):
            x_BTD = self._model.hidden(_row(new), attending)
            new = [int(self._model.project(x_BTD[:, -1]).argmax())]
            ids += new
        return Passage(tuple(ids), passage.source)

    def _encode(self, passage: Passage) -> CrossKeyValue | None:
        if not passage.source:
            return None
        source_1S = _row(passage.source)
        return self._model.encode(source_1S, torch.ones_like(source_1S, dtype=torch.bool))


def _row(ids: Sequence[int]) -> Tensor:
    return torch.tensor([list(ids)])
