"""Draws one row's token by reading its whole vocabulary, as the rules say it.

Knows: one row. Does not know: the other rows. Milliseconds for 49,152 tokens: for the rows that
export/operators/kernels/sampling.cpp finds too close to call. The exponentials, and the order of
sums, are the reference's own, to the last bit.
"""

from typing import NamedTuple

import numpy as np

from quill.server.sampling.arrays import Logits, Mask
from quill.server.sampling.penalties import Adjustments

# V vocabulary · C candidates, best first


class RowSettings(NamedTuple):
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    u: float


def draw_exactly(
    logits_V: Logits,
    adjustments: Adjustments | None,
    settings: RowSettings,
    mask: Mask | None = None,
) -> int:
    """Rules 5 to 10 of model/reference/sampling.py. Sorts values only; the id is looked up at the
    end."""
    scores_V = logits_V.astype(np.float64)
    if adjustments is not None:
        scores_V[adjustments.ids()] = adjustments.scores(logits_V)
    if mask is not None:
        bits = np.unpackbits(mask.view(np.uint8), count=len(scores_V), bitorder="little")
        scores_V[bits == 0] = -np.inf
    scores_C = np.sort(scores_V)[::-1].copy()
    with np.errstate(over="ignore"):  # a tiny temperature gives exp(-inf) = 0, as it should
        weights_C = np.exp((scores_C - scores_C[0]) / settings.temperature)
    sums_C = np.cumsum(weights_C)
    num_kept = min(len(sums_C), settings.top_k or len(sums_C))
    if settings.top_p < 1:
        num_kept = int(np.argmax(sums_C >= settings.top_p * sums_C[num_kept - 1])) + 1
    num_kept = min(num_kept, int(np.count_nonzero(weights_C >= settings.min_p)))
    rank = int(np.argmax(sums_C > settings.u * sums_C[num_kept - 1]))
    equals = np.flatnonzero(scores_V == scores_C[rank])  # by id
    return int(equals[rank - np.count_nonzero(scores_V > scores_C[rank])])
