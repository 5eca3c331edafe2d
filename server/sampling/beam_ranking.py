"""The best continuations of all beams of a step, request by request.

Knows: logits, beams. Does not know: when a search ends, rows' slots.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quill.server.outputs import PositionLogprobs
from quill.server.sampling import native
from quill.server.sampling.arrays import Ids, Logits, Scores
from quill.server.sampling.beam_search import Continuation, Search
from quill.server.sampling.logprobs import position_logprobs

# B beams of all searches, one after another · R rows · V vocabulary · T most tops of a beam
# N candidates of one search · C the best of them


class Rankings(NamedTuple):
    """What the searches may go on with."""

    ranked: list[list[Continuation]]  # for each search, best first
    broken: set[int]  # beams whose logits weren't finite: their continuations mean nothing


class _Candidates(NamedTuple):
    beams_N: Ids
    ids_N: Ids
    logprobs_N: Scores  # of the whole answer


def rank(
    logits_RV: Logits, searches: Sequence[Search], rows: Sequence[int] | None = None
) -> Rankings:
    """For each search, as many continuations as it looks at.

    Ties go to the better-ranked beam, then to the lower token id. The logits of the i-th beam of
    all are in row i, or in rows[i].
    """
    if rows is None:
        rows = range(len(logits_RV))
    tops = _tops(logits_RV, searches, rows)
    ranked, first = [], 0
    for search in searches:
        beams = slice(first, first + len(search.running))
        ranked.append(_best(logits_RV, _candidates(tops, search, beams), search, rows[beams]))
        first = beams.stop
    return Rankings(ranked, {*tops.broken})


def _tops(logits_RV: Logits, searches: Sequence[Search], rows: Sequence[int]) -> native.Tops:
    num_tops = [search.num_ranked for search in searches for _ in search.running]
    tops = native.tops(logits_RV, rows, num_tops)
    for i in tops.broken:  # as if all were equal: a search wants something to go on with
        num = tops.num_R[i] = min(num_tops[i], logits_RV.shape[1])
        tops.ids_RT[i, :num] = np.arange(num)
        tops.log_totals_R[i] = np.log(logits_RV.shape[1])
    return tops


def _candidates(tops: native.Tops, search: Search, beams: slice) -> _Candidates:
    so_far_B = np.array([beam.logprob for beam in search.running])
    logprobs_BT = tops.logits_RT[beams] + (so_far_B - tops.log_totals_R[beams])[:, None]
    is_there_BT = np.arange(logprobs_BT.shape[1]) < tops.num_R[beams][:, None]
    if search.hidden:  # a step looks at more than these: enough remain
        is_there_BT &= ~np.isin(tops.ids_RT[beams], [*search.hidden])
    beams_N, places_N = np.nonzero(is_there_BT)
    ids_N = tops.ids_RT[beams][beams_N, places_N]
    return _Candidates(beams_N, ids_N, logprobs_BT[beams_N, places_N])


def _best(
    logits_RV: Logits, candidates: _Candidates, search: Search, rows: Sequence[int]
) -> list[Continuation]:
    order_N = np.lexsort((candidates.ids_N, candidates.beams_N, -candidates.logprobs_N))
    best_C = order_N[: search.num_ranked]
    beams, ids = candidates.beams_N[best_C].tolist(), candidates.ids_N[best_C].tolist()
    reports: list[PositionLogprobs | None] = [None] * len(ids)
    if search.request.logprobs is not None:
        num_tops = [search.request.logprobs] * len(ids)
        reports = [*position_logprobs(logits_RV, ids, num_tops, [rows[beam] for beam in beams])]
    return list(map(Continuation, beams, ids, candidates.logprobs_N[best_C].tolist(), reports))
