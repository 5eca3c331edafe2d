"""Beam search for one request: the few best answers, found by following several at once.

Knows: log-probabilities, scores, when to stop, which row may follow which beam.
Does not know: logits, slots, the other requests.

The same rules as the reference, model/reference/beam_search.py, and the same answers: here the
beams are rows of a batch. They are written twice on purpose: the reference is the oracle that tests
compare with.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from quill.server.outputs import FinishReason, PositionLogprobs
from quill.server.request import BeamParams, Request


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
        return num_ranked(self.request)

    @property
    def hidden(self) -> frozenset[int]:
        """Tokens that aren't looked at: those that would end an answer too early."""
        is_short = len(self.running[0].token_ids) < self.request.min_new_tokens
        return self.request.ends if is_short else frozenset()

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
            reason = self._reason(beam)
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

    def _reason(self, beam: Beam) -> FinishReason | None:
        if beam.token_ids[-1] in self.request.eos_ids:
            return "eos"
        if beam.token_ids[-1] in self.request.stop_ids:
            return "stop"
        return "length" if len(beam.token_ids) == self._max_tokens else None

    def _score(self, logprob: float, length: int) -> float:
        return logprob / math.pow(length, self._beams.length_penalty)


def num_ranked(request: Request) -> int:
    """How many continuations a step looks at: enough remain when some end."""
    assert request.beams is not None
    return max(2, 1 + len(request.ends)) * request.beams.num_beams
