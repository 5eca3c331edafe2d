"""Draws a token for every row whose temperature isn't 0: rules 5 to 10 of model/sampling.py.

Knows: scores, settings, random numbers. Does not know: where any of them come from.

Only each row's best candidates are looked at, all rows at once. With top-k they are all there
is. Without, the rules need the weight of the whole vocabulary too. That is estimated, within
TOTAL_ERROR: where the estimate leaves a doubt, or the draw falls outside of the candidates, the
row is done again, exactly.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from server.arrays import Counts, Flags, Ids, Logits, Scores
from server.candidates import Adjusted, Candidates, best_candidates
from server.exact_draw import RowSettings, draw_exactly

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
    closed_R: Flags  # they are all that it leaves
    weights_RC: Scores  # the best one's is 1
    sums_RC: Scores  # running


class _Totals(NamedTuple):
    """The weight of all that top-k leaves lies between these. Equal for closed rows."""

    least_R: Scores
    most_R: Scores


def draw(logits_RV: Logits, settings: Settings, adjusted: Sequence[Adjusted]) -> list[int]:
    """A token for each row."""
    cuts_R = (settings.top_k_R > 0) & (settings.top_k_R <= MAX_TOP_K)
    k = int(np.where(cuts_R, settings.top_k_R, NUM_CANDIDATES).max())
    candidates = best_candidates(logits_RV, k, adjusted)
    heads = _weigh(candidates, settings, cuts_R)
    totals = _total(logits_RV, settings, adjusted, candidates, heads)
    ranks_R, certain_R = _rank(settings, heads, totals)
    tokens: list[int] = candidates.ids_RC[np.arange(len(ranks_R)), ranks_R].tolist()
    for row in np.flatnonzero(~certain_R).tolist():
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
        closed_R=(candidates.whole_R | cuts_R) & (candidates.num_R > 0),
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
    open_rows = np.flatnonzero(~heads.closed_R & matters_R)
    if len(open_rows):
        open_adjusted = [adjusted[row] for row in open_rows.tolist()]
        total_R[open_rows] = _estimate(
            logits_RV if len(open_rows) == len(logits_RV) else logits_RV[open_rows],
            *(open_adjusted, candidates.scores_RC[open_rows, 0], settings.temperature_R[open_rows]),
        )
    error_R = np.where(heads.closed_R, 0.0, TOTAL_ERROR)
    return _Totals(total_R * (1 - error_R), total_R * (1 + error_R))


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


def _rank(settings: Settings, heads: _Heads, totals: _Totals) -> tuple[Ids, Flags]:
    """Where in the candidates each draw falls, and whether that is certain."""
    num_kept_R, certain_R = _num_kept(settings, heads, totals)
    within_R = num_kept_R <= heads.num_R
    # All that is kept is at hand, or else nothing was cut and the totals are of all that is kept.
    kept_R = _sum_of_first(np.minimum(num_kept_R, heads.num_R), heads.sums_RC)
    least_R = np.where(within_R, kept_R, totals.least_R)
    most_R = np.where(within_R, kept_R, totals.most_R)
    rank_R = np.count_nonzero(heads.sums_RC <= (settings.u_R * least_R)[:, None], axis=1)
    most_rank_R = np.count_nonzero(heads.sums_RC <= (settings.u_R * most_R)[:, None], axis=1)
    certain_R &= (rank_R == most_rank_R) & (rank_R < heads.num_R)
    return np.where(certain_R, rank_R, 0), certain_R


def _num_kept(settings: Settings, heads: _Heads, totals: _Totals) -> tuple[Ids, Flags]:
    """How many candidates top-k, top-p and min-p leave, and whether that is certain.

    For an open row from which nothing is cut the number is just more than there are candidates.
    """
    all_R = np.where(heads.closed_R, heads.num_R, heads.sums_RC.shape[1] + 1)
    cuts_R = settings.top_p_R < 1
    num_R, most_R = (
        np.where(cuts_R, _num_below(settings.top_p_R * total_R, heads.sums_RC) + 1, all_R)
        for total_R in totals
    )
    known_total_R = heads.closed_R | ((settings.top_k_R == 0) & np.isfinite(totals.most_R))
    certain_R = known_total_R & (num_R == most_R)
    num_likely_R = np.count_nonzero(heads.weights_RC >= settings.min_p_R[:, None], axis=1)
    # If every candidate is likely enough, others that aren't at hand may be, too.
    known_R = heads.closed_R | (num_likely_R < heads.num_R)
    num_kept_R = np.where(known_R, np.minimum(num_R, num_likely_R), num_R)
    nothing_cut_R = ~cuts_R & (settings.min_p_R == 0)
    return num_kept_R, certain_R & ((num_kept_R <= heads.num_R) | nothing_cut_R)


def _num_below(bound_R: Scores, sums_RC: Scores) -> Ids:
    num_R: Counts = np.count_nonzero(sums_RC < bound_R[:, None], axis=1)
    return num_R


def _sum_of_first(num_R: Counts, sums_RC: Scores) -> Scores:
    sum_R: Scores = sums_RC[np.arange(len(num_R)), np.maximum(num_R, 1) - 1]
    return sum_R
