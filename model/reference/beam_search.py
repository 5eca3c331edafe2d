"""Beam search: the few best answers found by following several at once.

Knows: log-probabilities, scores, when to stop.
Does not know: sampling, text, how logits are computed (see model/reference/generate.py).

The rules are those of the `transformers` library, so that scores compare:

- an answer's score is its log-probability / length ** length_penalty, where the length counts its
  tokens, the stop token included; above 0 the penalty favours long answers, below 0 short ones;
- each step ranks all continuations of all running beams and looks at the best (1 + stop ids) x
  num_beams, at least twice num_beams, so that enough remain when some end;
- a continuation that ends is kept as an answer only if it ranks among the first num_beams;
- the first num_beams continuations that don't end run on;
- while beams have fewer than min_new_tokens, continuations by a stop id aren't looked at;
- the best num_beams answers are kept, and the search may end once there are that many: at once
  (early_stopping True); when the best running beam, at the length it has now, scores no better
  than the worst answer (False, a heuristic); or when it couldn't even at the
  length that flatters it most ("never", which is exact).

Ties go to the better-ranked beam, then to the lower token id.

Written twice on purpose: the server's search (server/sampling/beam_search.py) runs beams as
sequences of a batch, imports nothing from here, and must find the same answers.
Its tests hold it against this module.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from quill.model.errors import RequestError
from quill.model.network.network import Network
from quill.model.reference.generate import (
    FinishReason,
    LogitsArray,
    NextLogits,
    check_request,
    num_new_tokens,
    open_decoder,
)
from quill.model.reference.sampling import log_probabilities


@dataclass(frozen=True, kw_only=True)
class BeamParameters:
    """The number of beams, the length penalty, when to stop."""

    num_beams: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_return_sequences: int = 1
    max_new_tokens: int = 256
    stop_ids: frozenset[int] = frozenset()
    min_new_tokens: int = 0  # before so many, no stop id is looked at

    def __post_init__(self) -> None:
        self._require("num_beams", self.num_beams >= 1, "at least 1")
        self._require("length_penalty", -10 <= self.length_penalty <= 10, "from -10 to 10")
        self._require(
            "early_stopping", self.early_stopping in (False, True, "never"), "False, True or never"
        )
        returned_allowed = 1 <= self.num_return_sequences <= self.num_beams
        self._require("num_return_sequences", returned_allowed, "from 1 to num_beams")
        self._require("max_new_tokens", self.max_new_tokens >= 1, "at least 1")
        min_allowed = 0 <= self.min_new_tokens <= self.max_new_tokens
        self._require("min_new_tokens", min_allowed, "from 0 to max_new_tokens")

    def _require(self, name: str, allowed: bool, rule: str) -> None:
        if not allowed:
            raise RequestError(f"{name} is {getattr(self, name)}; it must be {rule}")

    @property
    def num_ranked(self) -> int:
        return max(2, 1 + len(self.stop_ids)) * self.num_beams


@dataclass(frozen=True)
class Hypothesis:
    """One answer. Its last token is the one that stopped it, if one did."""

    token_ids: tuple[int, ...]
    logprob: float  # of the whole answer
    score: float  # what answers are ranked by
    finish_reason: FinishReason


class Beam(NamedTuple):
    """An answer in the making, and the index of its parent in the step before."""

    token_ids: tuple[int, ...]
    logprob: float
    parent: int


def beam_search(
    model: Network,
    prompt_ids: Sequence[int],
    parameters: BeamParameters,
    *,
    source_ids: Sequence[int] | None = None,
    cached: bool = False,
) -> list[Hypothesis]:
    """The best answers to `prompt_ids`, best first."""
    check_request(model, prompt_ids, source_ids, parameters.stop_ids)
    next_logits = open_decoder(model, source_ids, cached)
    max_length = num_new_tokens(model, prompt_ids, parameters.max_new_tokens)
    return search(next_logits, prompt_ids, parameters, max_length)


def search(
    next_logits: NextLogits, prompt_ids: Sequence[int], parameters: BeamParameters, max_length: int
) -> list[Hypothesis]:
    """The same, wherever the logits come from."""
    running = [Beam((), 0.0, 0)]
    answers: list[Hypothesis] = []
    while running and not _is_over(running, answers, parameters, max_length):
        rows = [[*prompt_ids, *beam.token_ids] for beam in running]
        logits_RV = next_logits(rows, [beam.parent for beam in running])
        ranked = _rank(running, logits_RV, parameters)
        answers = _keep_answers(answers, ranked, parameters, max_length)
        running = [beam for beam in ranked if not _ending(beam, parameters, max_length)]
        running = running[: parameters.num_beams]
    return answers[: parameters.num_return_sequences]


def _rank(running: list[Beam], logits_RV: LogitsArray, parameters: BeamParameters) -> list[Beam]:
    """The best continuations of all beams by one token."""
    log_probs_RV = np.stack([log_probabilities(logits_V) for logits_V in logits_RV])
    sums_RV = log_probs_RV + np.array([[beam.logprob] for beam in running])
    is_short = len(running[0].token_ids) < parameters.min_new_tokens
    hidden = parameters.stop_ids if is_short else frozenset()
    ranked: list[Beam] = []
    for index in map(int, np.argsort(-sums_RV, axis=None, kind="stable")):
        row, token = divmod(index, sums_RV.shape[1])
        if token not in hidden:
            ranked.append(Beam((*running[row].token_ids, token), float(sums_RV[row, token]), row))
        if len(ranked) == parameters.num_ranked:
            break
    return ranked


def _keep_answers(
    answers: list[Hypothesis], ranked: list[Beam], parameters: BeamParameters, max_length: int
) -> list[Hypothesis]:
    for beam in ranked[: parameters.num_beams]:
        finish_reason = _ending(beam, parameters, max_length)
        if finish_reason is not None:
            score = _score(beam.logprob, len(beam.token_ids), parameters)
            answers = [*answers, Hypothesis(beam.token_ids, beam.logprob, score, finish_reason)]
    return sorted(answers, key=lambda answer: -answer.score)[: parameters.num_beams]


def _ending(beam: Beam, parameters: BeamParameters, max_length: int) -> FinishReason | None:
    if beam.token_ids[-1] in parameters.stop_ids:
        return "stop"
    return "length" if len(beam.token_ids) == max_length else None


def _is_over(
    running: list[Beam], answers: list[Hypothesis], parameters: BeamParameters, max_length: int
) -> bool:
    """Whether no running beam is expected to give an answer worth keeping."""
    if len(answers) < parameters.num_beams:
        return False
    if parameters.early_stopping is True:
        return True
    length = len(running[0].token_ids)
    if parameters.early_stopping == "never" and parameters.length_penalty > 0:
        length = max_length
    return _score(running[0].logprob, length, parameters) <= answers[-1].score


def _score(logprob: float, length: int, parameters: BeamParameters) -> float:
    return logprob / math.pow(length, parameters.length_penalty)
