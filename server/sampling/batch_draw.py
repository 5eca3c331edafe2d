"""Draws a token for every row whose temperature isn't 0.

These are rules 5 to 10 of model/reference/sampling.py.

Knows: scores, settings, random numbers. Does not know: where any of them come from.

Only each row's best candidates are looked at, all rows at once. With top-k they are all there
is. Without, the rules need the weight of the whole vocabulary too. That is estimated, within
TOTAL_ERROR: where the estimate leaves a doubt, or the draw falls outside of the candidates, the
row is done again, exactly.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quill.server.sampling.arrays import Counts, Flags, Logits, Scores
from quill.server.sampling.candidates import Adjusted, Candidates, best_candidates
from quill.server.sampling.exact_draw import RowSettings, draw_exactly

# R rows · V vocabulary · C candidates, best first


NUM_CANDIDATES = 256  # of a row without top-k
MAX_TOP_K = 512  # above, a row is drawn exactly

# Relative. The estimate sums V exponentials in float32, which is off by at most 2**-24 x
# (3 ln V for rounded exponents + 5 for exp + 2 log2 V for the sum): 5e-6 at V = 10**6.
TOTAL_ERROR = 1e-5


class Settings(NamedTuple):
    """One number a row."""

    temperature_R: Scores
    top_k_R: Counts
    top_p_R: Scores
    min_p_R: Scores
    u_R: Scores


class _Heads(NamedTuple):
    """The candidates' weights."""

    num_R: Counts  # candidates at hand that top-k leaves
    is_complete_R: Flags  # they are all that it leaves
    weights_RC: Scores  # the best one's is 1
    sums_RC: Scores  # running


class _Totals(NamedTuple):
    """The weight of all that top-k leaves lies between these. Equal for complete heads."""

    least_R: Scores
    most_R: Scores
    is_bounded_R: Flags  # False: nothing is known of it


class _Kept(NamedTuple):
    """What top-p and min-p keep of what top-k left."""

    num_R: Counts  # candidates, if all that is kept is in the head
    is_in_head_R: Flags
    is_all_R: Flags  # they cut nothing
    is_same_R: Flags  # whichever of the possible totals is right


def draw(logits_RV: Logits, settings: Settings, adjusted: Sequence[Adjusted]) -> list[int]:
    """A token for each row."""
    cuts_R = (settings.top_k_R > 0) & (settings.top_k_R <= MAX_TOP_K)
    k = int(np.where(cuts_R, settings.top_k_R, NUM_CANDIDATES).max())
    candidates = best_candidates(logits_RV, k, adjusted)
    heads = _weigh(candidates, settings, cuts_R)
    totals = _total(logits_RV, settings, adjusted, candidates, heads)
    ranks_R, is_decided_R = _rank(settings, heads, totals)
    tokens: list[int] = candidates.ids_RC[np.arange(len(ranks_R)), ranks_R].tolist()
    for row in np.flatnonzero(~is_decided_R).tolist():
        row_settings = RowSettings(*(setting_R[row].item() for setting_R in settings))
        tokens[row] = draw_exactly(logits_RV[row], adjusted[row], row_settings)
    return tokens


def _weigh(candidates: Candidates, settings: Settings, cuts_R: Flags) -> _Heads:
    top_R = np.where(candidates.num_R > 0, candidates.scores_RC[:, 0], 0.0)
    with np.errstate(over="ignore"):  # a tiny temperature gives exp(-inf) = 0, as it should
        relative_RC = (candidates.scores_RC - top_R[:, None]) / settings.temperature_R[:, None]
    weights_RC = np.exp(relative_RC)
    limited_R = np.minimum(settings.top_k_R, candidates.num_R)
    return _Heads(
        num_R=np.where(settings.top_k_R > 0, limited_R, candidates.num_R),
        is_complete_R=(candidates.whole_R | cuts_R) & (candidates.num_R > 0),
        weights_RC=weights_RC,
        sums_RC=np.cumsum(weights_RC, axis=1),
    )


def _total(
    logits_RV: Logits,
    settings: Settings,
    adjusted: Sequence[Adjusted],
    candidates: Candidates,
    heads: _Heads,
) -> _Totals:
    total_R = _sum_of_first(heads.num_R, heads.sums_RC)
    # With min-p alone, the candidates that it leaves are all that matters.
    matters_R = (settings.top_p_R < 1) | (settings.min_p_R == 0)
    open_rows = np.flatnonzero(~heads.is_complete_R & matters_R)
    if len(open_rows):
        open_adjusted = [adjusted[row] for row in open_rows.tolist()]
        total_R[open_rows] = _estimate(
            logits_RV if len(open_rows) == len(logits_RV) else logits_RV[open_rows],
            *(open_adjusted, candidates.scores_RC[open_rows, 0], settings.temperature_R[open_rows]),
        )
    error_R = np.where(heads.is_complete_R, 0.0, TOTAL_ERROR)
    # A top-k of more than MAX_TOP_K leaves less than the whole that is estimated.
    is_estimated_R = (settings.top_k_R == 0) & np.isfinite(total_R)
    return _Totals(
        least_R=total_R * (1 - error_R),
        most_R=total_R * (1 + error_R),
        is_bounded_R=heads.is_complete_R | is_estimated_R,
    )


def _estimate(
    logits_RV: Logits,
    adjusted: Sequence[Adjusted],
    top_R: Scores,
    temperature_R: Scores,
) -> Scores:
    """The weight of the whole vocabulary. NaN where it can't be told, as at tiny temperatures."""
    with np.errstate(all="ignore"):
        top_logit_R = logits_RV.max(axis=1)
        weights_RV = logits_RV - top_logit_R[:, None]
        weights_RV *= (1 / temperature_R).astype(np.float32)[:, None]
        np.exp(weights_RV, out=weights_RV)
        scale_R = np.exp((top_logit_R - top_R) / temperature_R)
        total_R: Scores = weights_RV.sum(axis=1) * scale_R
        for row, (_, scores_A) in enumerate(adjusted):
            if len(scores_A):
                total_R[row] += np.exp((scores_A - top_R[row]) / temperature_R[row]).sum()
    return total_R


def _rank(settings: Settings, heads: _Heads, totals: _Totals) -> tuple[Counts, Flags]:
    """Where in its head each draw falls, and whether that is decided: if not, it says nothing.

    Three rows whose heads have the weights 1, 0.5, 0.3 and 0.2, so the sums 1, 1.5, 1.8 and 2:

    - top_k 4, top_p 0.8, u 0.7. The head is complete and its total is 2. Top-p keeps what first
      reaches 0.8 x 2: three candidates, of weight 1.8. The draw is at 0.7 x 1.8 = 1.26, rank 1.
    - No top-k, top_p 0.5. The total is estimated as 3, give or take 0.00003. Half of the least
      total is reached by 1.5 and two candidates, half of the most by 1.8 and three. Not decided.
    - Nothing is cut, and the total is the same. With u 0.4 the draw is at 1.2, whichever total is
      right: rank 1. With u 0.9 it is at 2.7, behind all that the head has. Not decided.
    """
    kept = _keep(settings, heads, totals)
    kept_R = _sum_of_first(np.minimum(kept.num_R, heads.num_R), heads.sums_RC)
    least_R = np.where(kept.is_in_head_R, kept_R, totals.least_R)
    most_R = np.where(kept.is_in_head_R, kept_R, totals.most_R)
    rank_R = np.count_nonzero(heads.sums_RC <= (settings.u_R * least_R)[:, None], axis=1)
    most_rank_R = np.count_nonzero(heads.sums_RC <= (settings.u_R * most_R)[:, None], axis=1)
    is_decided_R = (
        totals.is_bounded_R
        & kept.is_same_R
        & (kept.is_in_head_R | kept.is_all_R)
        & (rank_R == most_rank_R)
        & (rank_R < heads.num_R)
    )
    return np.where(is_decided_R, rank_R, 0), is_decided_R


def _keep(settings: Settings, heads: _Heads, totals: _Totals) -> _Kept:
    has_top_p_R = settings.top_p_R < 1
    least_num_R, most_num_R = (
        np.count_nonzero(heads.sums_RC < (settings.top_p_R * total_R)[:, None], axis=1) + 1
        for total_R in (totals.least_R, totals.most_R)
    )
    top_p_ends_in_head_R = np.where(has_top_p_R, least_num_R <= heads.num_R, heads.is_complete_R)
    num_R = np.where(has_top_p_R, least_num_R, heads.num_R)
    num_likely_R = np.count_nonzero(heads.weights_RC >= settings.min_p_R[:, None], axis=1)
    # If all of the head is likely enough, tokens outside of it may be, too.
    min_p_ends_in_head_R = heads.is_complete_R | (num_likely_R < heads.num_R)
    return _Kept(
        num_R=np.where(min_p_ends_in_head_R, np.minimum(num_R, num_likely_R), num_R),
        is_in_head_R=top_p_ends_in_head_R | min_p_ends_in_head_R,
        is_all_R=~has_top_p_R & (settings.min_p_R == 0),
        is_same_R=~has_top_p_R | (least_num_R == most_num_R),
    )


def _sum_of_first(num_R: Counts, sums_RC: Scores) -> Scores:
    sum_R: Scores = sums_RC[np.arange(len(num_R)), np.maximum(num_R, 1) - 1]
    return sum_R
