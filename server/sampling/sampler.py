"""Chooses a token for every row of a step.

Knows: logits, each row's sampling, seed and position. Does not know: caches, text, time.

The same rules as the reference, model/reference/sampling.py, and the same tokens, only faster. They
are written twice on purpose: the reference is the oracle that tests compare with. Penalties are in
server/sampling/penalties.py, the draw is in server/sampling/batch_draw.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quill.server.request import Sampling
from quill.server.sampling.arrays import Logits
from quill.server.sampling.batch_draw import Settings, draw
from quill.server.sampling.candidates import Adjusted
from quill.server.sampling.penalties import Adjustments
from quill.server.sampling.randomness import uniforms

# R rows · V vocabulary


class Draw(NamedTuple):
    """All that a row's next token depends on, beside its logits."""

    sampling: Sampling
    seed: int
    position: int  # in the answer, from 0
    adjustments: Adjustments | None  # None: the sampling adjusts nothing


_NOTHING_ADJUSTED = Adjusted(np.zeros(0, np.int64), np.zeros(0))


def choose(logits_RV: Logits, draws: Sequence[Draw]) -> list[int]:
    """The next token of each row. Logits of adjusted tokens are overwritten."""
    adjusted = [_set_apart(row_V, each) for row_V, each in zip(logits_RV, draws, strict=True)]
    drawn = [row for row, each in enumerate(draws) if each.sampling.temperature > 0]
    tokens = [0] * len(draws) if len(drawn) == len(draws) else _greedy(logits_RV, adjusted)
    if drawn:
        drawn_RV = logits_RV if len(drawn) == len(draws) else logits_RV[drawn]
        settings = _settings([draws[row] for row in drawn])
        chosen = draw(drawn_RV, settings, [adjusted[row] for row in drawn])
        for row, token in zip(drawn, chosen, strict=True):
            tokens[row] = token
    return tokens


def _set_apart(logits_V: Logits, each: Draw) -> Adjusted:
    if each.adjustments is None:
        return _NOTHING_ADJUSTED
    ids_A = each.adjustments.ids()
    adjusted = Adjusted(ids_A, each.adjustments.scores(logits_V))
    logits_V[ids_A] = -np.inf
    return adjusted


def _greedy(logits_RV: Logits, adjusted: Sequence[Adjusted]) -> list[int]:
    tokens: list[int] = logits_RV.argmax(axis=1).tolist()
    for row, (ids_A, scores_A) in enumerate(adjusted):
        if len(ids_A):
            plain, score = logits_RV[row, tokens[row]], scores_A.max()
            token = int(ids_A[scores_A == score].min())
            if score > plain or (score == plain and token < tokens[row]):
                tokens[row] = token
    return tokens


def _settings(draws: Sequence[Draw]) -> Settings:
    samplings = [each.sampling for each in draws]
    return Settings(
        np.array([sampling.temperature for sampling in samplings]),
        np.array([sampling.top_k for sampling in samplings]),
        np.array([sampling.top_p for sampling in samplings]),
        np.array([sampling.min_p for sampling in samplings]),
        uniforms([each.seed for each in draws], [each.position for each in draws]),
    )
