"""Log-probabilities of tokens in the model's own distribution.

Knows: logits as the graph gave them. Does not know: penalties, temperature, how tokens are drawn.
"""

from collections.abc import Sequence

import numpy as np

from quill.server.events import Alternative, PositionLogprobs
from quill.server.sampling.arrays import Logits, Scores
from quill.server.sampling.top_k import find_top_k

# R rows · V vocabulary


def position_logprobs(
    logits_RV: Logits, tokens: Sequence[int], num_tops: Sequence[int]
) -> list[PositionLogprobs]:
    """For each row: its token, and as many of the likeliest tokens as are asked for."""
    log_totals_R = log_totals(logits_RV)
    logprobs_R = logits_RV[np.arange(len(tokens)), tokens] - log_totals_R
    tops = _tops(logits_RV, log_totals_R, num_tops)
    return list(map(PositionLogprobs, tokens, logprobs_R.tolist(), tops))


def log_totals(logits_RV: Logits) -> Scores:
    """What to subtract from logits to make log-probabilities of them; within 1e-5."""
    top_R = logits_RV.max(axis=1)
    total_R = np.exp(logits_RV - top_R[:, None]).sum(axis=1)
    log_totals_R: Scores = top_R.astype(np.float64) + np.log(total_R.astype(np.float64))
    return log_totals_R


def _tops(
    logits_RV: Logits, log_totals_R: Scores, num_tops: Sequence[int]
) -> list[tuple[Alternative, ...]]:
    most = max(num_tops)
    if most == 0:
        return [()] * len(num_tops)
    rows_N, ids_N, _ = find_top_k(logits_RV, most)
    ends = np.searchsorted(rows_N, np.arange(len(num_tops)), side="right").tolist()
    tops, start = [], 0
    for row, end in enumerate(ends):
        ids = ids_N[start:end]
        order = np.argsort(-logits_RV[row, ids], kind="stable")[: num_tops[row]]
        logprobs = logits_RV[row, ids[order]] - log_totals_R[row]
        tops.append(tuple(map(Alternative, ids[order].tolist(), logprobs.tolist())))
        start = end
    return tops
