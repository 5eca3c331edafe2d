"""The best continuations of all beams of a step, request by request.

Knows: logits, beams. Does not know: when a search ends, rows' slots.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quill.server.events import PositionLogprobs
from quill.server.sampling.arrays import Ids, Logits, Scores
from quill.server.sampling.beam_search import Continuation, Search
from quill.server.sampling.logprobs import log_totals, position_logprobs
from quill.server.sampling.top_k import find_top_k

# R rows: the beams of all searches, one after another · V vocabulary
# N candidates of all rows together · C candidates of one search


class _Candidates(NamedTuple):
    rows_N: Ids  # ascending, and so are the ids of each row
    ids_N: Ids
    logprobs_N: Scores  # of the whole answer

    def between(self, start: int, stop: int) -> "_Candidates":
        part = slice(start, stop)
        return _Candidates(self.rows_N[part], self.ids_N[part], self.logprobs_N[part])


def rank(logits_RV: Logits, searches: Sequence[Search]) -> list[list[Continuation]]:
    """For each search, as many continuations as it looks at, best first.

    Ties go to the better-ranked beam, then to the lower token id.
    """
    candidates = _candidates(logits_RV, searches)
    ranked, first_row = [], 0
    for search in searches:
        rows = slice(first_row, first_row + len(search.running))
        start, stop = np.searchsorted(candidates.rows_N, (rows.start, rows.stop))
        ranked.append(_best(logits_RV, candidates.between(start, stop), search, rows.start))
        first_row = rows.stop
    return ranked


def _candidates(logits_RV: Logits, searches: Sequence[Search]) -> _Candidates:
    most = max(search.num_ranked for search in searches)
    rows_N, ids_N, _ = find_top_k(logits_RV, most)
    so_far_R = np.array([beam.logprob for search in searches for beam in search.running])
    offsets_R = so_far_R - log_totals(logits_RV)
    return _Candidates(rows_N, ids_N, logits_RV[rows_N, ids_N] + offsets_R[rows_N])


def _best(
    logits_RV: Logits, candidates: _Candidates, search: Search, first_row: int
) -> list[Continuation]:
    best_C = np.argsort(-candidates.logprobs_N, kind="stable")[: search.num_ranked]
    rows_C, ids_C = candidates.rows_N[best_C], candidates.ids_N[best_C].tolist()
    reports: list[PositionLogprobs | None] = [None] * len(ids_C)
    if search.request.logprobs is not None:
        num_tops = [search.request.logprobs] * len(ids_C)
        reports = [*position_logprobs(logits_RV[rows_C], ids_C, num_tops)]
    logprobs_C = candidates.logprobs_N[best_C].tolist()
    return list(map(Continuation, (rows_C - first_row).tolist(), ids_C, logprobs_C, reports))
