"""The head of every row's distribution: the tokens that are likely to be drawn, best first.

Knows: logits, adjusted scores. Does not know: temperature, top-p, randomness.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quill.server.sampling.arrays import Counts, Flags, Ids, Logits, Scores
from quill.server.sampling.top_k import find_top_k

# R rows · V vocabulary · C candidates, best first · A adjusted tokens · N candidates of all rows


class Adjusted(NamedTuple):
    """The tokens of a row that have a score of their own. Their logits are -inf."""

    ids_A: Ids
    scores_A: Scores


class Candidates(NamedTuple):
    """By score descending, then by id ascending; padded with scores of -inf."""

    ids_RC: Ids
    scores_RC: Scores
    num_R: Counts  # without the padding
    whole_R: Flags  # nothing that could be drawn was left out


class _Found(NamedTuple):
    rows_N: Ids
    ids_N: Ids
    scores_N: Scores

    def pick(self, which_N: Ids | Flags) -> "_Found":
        return _Found(self.rows_N[which_N], self.ids_N[which_N], self.scores_N[which_N])


def best_candidates(logits_RV: Logits, k: int, adjusted: Sequence[Adjusted]) -> Candidates:
    """At least the k best of each row. A row with too many equals gets none (`num_R` is 0)."""
    found, thresholds_R = _find(logits_RV, k, adjusted)
    num_R = np.bincount(found.rows_N, minlength=len(logits_RV))
    too_many = 4 * k + 64
    if num_R.max() > too_many:
        found = found.pick(num_R[found.rows_N] <= too_many)
        num_R = np.where(num_R <= too_many, num_R, 0)
    ids_RC, scores_RC = _in_rows(found, num_R)
    # Ids ascend within a row, so a stable sort leaves the lowest id first among equals.
    order_RC = np.argsort(-scores_RC, axis=1, kind="stable")
    return Candidates(
        np.take_along_axis(ids_RC, order_RC, axis=1),
        np.take_along_axis(scores_RC, order_RC, axis=1),
        num_R,
        (thresholds_R == -np.inf) & (num_R > 0),
    )


def _find(logits_RV: Logits, k: int, adjusted: Sequence[Adjusted]) -> tuple[_Found, Logits]:
    """Everything that reaches its row's threshold, by row, then by id."""
    rows_N, ids_N, thresholds_R = find_top_k(logits_RV, k)
    found = _Found(rows_N, ids_N, logits_RV[rows_N, ids_N].astype(np.float64))
    parts = [found]
    for row, (ids_A, scores_A) in enumerate(adjusted):
        if len(ids_A):
            reach_A = scores_A >= thresholds_R[row]
            rows_A = np.full(np.count_nonzero(reach_A), row)
            parts.append(_Found(rows_A, ids_A[reach_A], scores_A[reach_A]))
    if len(parts) > 1:
        found = _Found(*(np.concatenate(part) for part in zip(*parts, strict=True)))
        found = found.pick(np.lexsort((found.ids_N, found.rows_N)))
    return found, thresholds_R


def _in_rows(found: _Found, num_R: Counts) -> tuple[Ids, Scores]:
    shape = (len(num_R), max(1, int(num_R.max())))
    ids_RC, scores_RC = np.zeros(shape, np.int64), np.full(shape, -np.inf)
    starts_R = np.cumsum(num_R) - num_R
    places_N = np.arange(len(found.rows_N)) - starts_R[found.rows_N]
    ids_RC[found.rows_N, places_N] = found.ids_N
    scores_RC[found.rows_N, places_N] = found.scores_N
    return ids_RC, scores_RC
