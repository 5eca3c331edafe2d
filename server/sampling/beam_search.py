"""Beam search for one request: the best answers, found by following several beams at once.

Knows: logits, log-probabilities, scores, when a search ends, which beam follows which.
Does not know: blocks, the other requests.

The same rules as the reference, model/reference/beam_search.py, and the same answers: here the
beams are sequences of a batch. They are written twice on purpose: tests compare with the reference.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quill.server.outputs import FinishReason, PositionLogprobs
from quill.server.request import BeamParams, Request
from quill.server.sampling import native
from quill.server.sampling.native import Ids, Logits, Scores
from quill.server.sampling.sampler import position_logprobs


class Beam(NamedTuple):
    """An answer in the making."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0  # of the whole answer
    reports: tuple[PositionLogprobs, ...] = ()  # one a token, if they were asked for


class Continuation(NamedTuple):
    """One token after one of the running beams."""

    parent: int  # the beam's rank
    token: int
    logprob: float  # of the whole answer
    report: PositionLogprobs | None


class Hypothesis(NamedTuple):
    """A complete answer."""

    beam: Beam
    score: float  # what answers are ranked by
    reason: FinishReason


class Search:
    """From the prompt to the best answers."""

    def __init__(self, request: Request, max_tokens: int) -> None:
        assert request.beams is not None
        self.request = request
        self._beams: BeamParams = request.beams
        self._max_tokens = max_tokens
        self.running = [Beam()]  # best first
        self.answers: list[Hypothesis] = []  # best first

    @property
    def num_ranked(self) -> int:
        """How many continuations a step looks at: enough remain when some end."""
        return max(2, 1 + len(self.request.all_stop_ids)) * self._beams.num_beams

    @property
    def banned(self) -> frozenset[int]:
        """Tokens that aren't looked at: those that would end an answer too early."""
        is_short = len(self.running[0].token_ids) < self.request.min_new_tokens
        return self.request.all_stop_ids if is_short else frozenset()

    @property
    def is_over(self) -> bool:
        """Whether no running beam is expected to give an answer worth keeping."""
        if not self.running:
            return True
        if len(self.answers) < self._beams.num_beams:
            return False
        if self._beams.early_stopping == "at_once":
            return True
        best = self.running[0]
        length = len(best.token_ids)
        if self._beams.early_stopping == "never" and self._beams.length_penalty > 0:
            length = self._max_tokens
        return self._score(best.logprob, length) <= self.answers[-1].score

    def advance(self, ranked: Sequence[Continuation]) -> list[int]:
        """Takes the best continuations, best first. The parent of each beam that runs on."""
        running: list[Beam] = []
        parents: list[int] = []
        for place, each in enumerate(ranked):
            beam = self._continued(each)
            reason = self.request.finish_reason(beam.token_ids, self._max_tokens)
            if reason is None and len(running) < self._beams.num_beams:
                running.append(beam)
                parents.append(each.parent)
            elif reason is not None and place < self._beams.num_beams:
                score = self._score(beam.logprob, len(beam.token_ids))
                self.answers.append(Hypothesis(beam, score, reason))
        self.answers.sort(key=lambda answer: -answer.score)
        del self.answers[self._beams.num_beams :]
        self.running = running
        return parents

    def _continued(self, continuation: Continuation) -> Beam:
        parent = self.running[continuation.parent]
        reports = () if continuation.report is None else (continuation.report,)
        return Beam(
            (*parent.token_ids, continuation.token),
            continuation.logprob,
            (*parent.reports, *reports),
        )

    def _score(self, logprob: float, length: int) -> float:
        return logprob / math.pow(length, self._beams.length_penalty)


# B beams of all searches, one after another · R rows · V vocabulary · T most tops of a beam
# N candidates of one search · C the best of them


class Rankings(NamedTuple):
    """What the searches may go on with."""

    ranked: list[list[Continuation]]  # for each search, best first
    not_finite: set[int]  # beams whose logits weren't finite: their continuations mean nothing


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
    return Rankings(ranked, {*tops.not_finite})


def _tops(logits_RV: Logits, searches: Sequence[Search], rows: Sequence[int]) -> native.Tops:
    num_tops = [search.num_ranked for search in searches for _ in search.running]
    tops = native.tops(logits_RV, rows, num_tops)
    for i in tops.not_finite:  # as if all were equal: a search wants something to go on with
        num = tops.num_R[i] = min(num_tops[i], logits_RV.shape[1])
        tops.ids_RT[i, :num] = np.arange(num)
        tops.log_totals_R[i] = np.log(logits_RV.shape[1])
    return tops


def _candidates(tops: native.Tops, search: Search, beams: slice) -> _Candidates:
    so_far_B = np.array([beam.logprob for beam in search.running])
    logprobs_BT = tops.logits_RT[beams] + (so_far_B - tops.log_totals_R[beams])[:, None]
    is_there_BT = np.arange(logprobs_BT.shape[1]) < tops.num_R[beams][:, None]
    if search.banned:  # a step looks at more than these: enough remain
        is_there_BT &= ~np.isin(tops.ids_RT[beams], [*search.banned])
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
