"""Samples a token for every sequence of a step, and reports logprobs.

Knows: logits, each sequence's sampling, seed and position. Does not know: caches, text, time.

The same rules as the reference, model/reference/sampling.py, and the same tokens, only faster. They
are written twice on purpose: tests compare with the reference. The second time is
export/operators/kernels/sampling.cpp; a token that the kernel finds too close to call is sampled
exactly here. The random number of each token has the same bits as the reference,
model/randomness.py: SplitMix64, a pure function of a seed and a position.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quill.server.outputs import Alternative, PositionLogprobs
from quill.server.request import SamplingParams
from quill.server.sampling import native
from quill.server.sampling.native import Ids, Logits, Mask, Scores

# R rows of logits · V vocabulary · C candidates, best first · A adjusted tokens

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))

UInt64Array = npt.NDArray[np.uint64]


class Adjustments:
    """One sequence's adjusted tokens: penalties, bias, bans. Other tokens are never looked at."""

    def __init__(
        self,
        sampling: SamplingParams,
        prompt_ids: tuple[int, ...],
        max_new_tokens: int,
        banned: Collection[int] = (),
    ) -> None:
        """`banned`: tokens that can't be chosen until they are allowed."""
        self._sampling = sampling
        repeats = sampling.repetition_penalty != 1
        known = {
            **dict.fromkeys(prompt_ids if repeats else ()),
            **sampling.logit_bias,
            **dict.fromkeys(banned),
        }
        self._places = {token: place for place, token in enumerate(known)}
        size = len(known) + max_new_tokens
        self._ids = np.zeros(size, np.int64)
        self._ids[: len(known)] = list(known)
        self._in_text = np.zeros(size, np.bool_)
        self._in_text[[self._places[token] for token in prompt_ids if token in known]] = True
        self._counts = np.zeros(size)  # in the answer
        self._bias = np.zeros(size)
        self._bias[: len(known)] = [sampling.logit_bias.get(token, 0.0) for token in known]
        self._bias[[self._places[token] for token in banned]] = -np.inf
        arrays = (self._ids, self._in_text, self._counts, self._bias)
        self._addresses = tuple(array.ctypes.data for array in arrays)

    def allow(self, tokens: Iterable[int]) -> None:
        """Known ones: they have the client's bias and no other."""
        for token in tokens:
            self._bias[self._places[token]] = self._sampling.logit_bias.get(token, 0.0)

    def add(self, token: int) -> None:
        """The answer has this token (once more)."""
        place = self._places.setdefault(token, len(self._places))
        self._ids[place] = token
        self._in_text[place] = True
        self._counts[place] += 1

    def addresses(self) -> tuple[int, ...]:
        """How many tokens there are, and where: ids, whether in the text, counts, biases."""
        return len(self._places), *self._addresses

    def ids(self) -> Ids:
        return self._ids[: len(self._places)]

    def scores(self, logits_V: Logits) -> Scores:
        """The adjusted logits of `ids()`."""
        num = len(self._places)
        sampling, counts_A = self._sampling, self._counts[:num]
        scores_A = logits_V[self._ids[:num]].astype(np.float64)
        penalty = sampling.repetition_penalty
        penalized_A = np.where(scores_A > 0, scores_A / penalty, scores_A * penalty)
        scores_A = np.where(self._in_text[:num], penalized_A, scores_A)
        subtracted_A = sampling.frequency_penalty * counts_A + sampling.presence_penalty
        scores_A = np.where(counts_A > 0, scores_A - subtracted_A, scores_A)
        return scores_A + self._bias[:num]


class SamplerInput(NamedTuple):
    """All that a sequence's next token depends on, beside its logits."""

    sampling: SamplingParams
    seed: int
    position: int  # in the answer, from 0
    adjustments: Adjustments | None  # None: no logit is adjusted
    mask: Mask | None = None  # None: every token is allowed


class Sampled(NamedTuple):
    tokens: list[int]
    not_finite: set[int]  # inputs whose logits weren't finite: their tokens mean nothing


def sample(
    logits_RV: Logits, inputs: Sequence[SamplerInput], rows: Sequence[int] | None = None
) -> Sampled:
    """A token for each input. Input i has the logits of row i, or of rows[i]."""
    if rows is None:
        rows = range(len(logits_RV))
    us = _uniforms(inputs)
    packed = [_pack(*each) for each in zip(rows, inputs, us, strict=True)]
    tokens, in_doubt, not_finite = native.sample(logits_RV, rows, packed)
    for i in in_doubt:
        tokens[i] = sample_exactly(logits_RV[rows[i]], inputs[i], us[i])
    return Sampled(tokens, {*not_finite})


def _uniforms(inputs: Sequence[SamplerInput]) -> list[float]:
    if all(each.sampling.temperature == 0 for each in inputs):
        return [0.0] * len(inputs)  # greedy: no random number is needed
    seeds, positions = [each.seed for each in inputs], [each.position for each in inputs]
    us: list[float] = uniforms(seeds, positions).tolist()
    return us


def _pack(row: int, each: SamplerInput, u: float) -> bytes:
    sampling, adjustments, mask = each.sampling, each.adjustments, each.mask
    return native.pack(
        row,
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        u,
        min(sampling.top_k, native.MAX_TOP_K),
        sampling.repetition_penalty,
        sampling.frequency_penalty,
        sampling.presence_penalty,
        *(native.NOTHING_ADJUSTED if adjustments is None else adjustments.addresses()),
        0 if mask is None else mask.ctypes.data,
    )


def sample_exactly(logits_V: Logits, each: SamplerInput, u: float) -> int:
    """Rules 5 to 10 of model/reference/sampling.py, over the whole vocabulary: milliseconds for
    49,152 tokens. The exponentials, and the order of sums, are the reference's to the last bit.

    Sorts values only; the id is looked up at the end.
    """
    sampling, adjustments = each.sampling, each.adjustments
    scores_V = logits_V.astype(np.float64)
    if adjustments is not None:
        scores_V[adjustments.ids()] = adjustments.scores(logits_V)
    if each.mask is not None:
        bits = np.unpackbits(each.mask.view(np.uint8), count=len(scores_V), bitorder="little")
        scores_V[bits == 0] = -np.inf
    scores_C = np.sort(scores_V)[::-1].copy()
    with np.errstate(over="ignore"):  # a tiny temperature gives exp(-inf) = 0, as it should
        weights_C = np.exp((scores_C - scores_C[0]) / sampling.temperature)
    sums_C = np.cumsum(weights_C)
    num_kept = min(len(sums_C), sampling.top_k or len(sums_C))
    if sampling.top_p < 1:
        num_kept = int(np.argmax(sums_C >= sampling.top_p * sums_C[num_kept - 1])) + 1
    num_kept = min(num_kept, int(np.count_nonzero(weights_C >= sampling.min_p)))
    rank = int(np.argmax(sums_C > u * sums_C[num_kept - 1]))
    equals = np.flatnonzero(scores_V == scores_C[rank])  # by id
    return int(equals[rank - np.count_nonzero(scores_V > scores_C[rank])])


def position_logprobs(
    logits_RV: Logits,
    tokens: Sequence[int],
    num_tops: Sequence[int],
    rows: Sequence[int] | None = None,
) -> list[PositionLogprobs]:
    """Of tokens in the model's own distribution, before penalties and temperature: each token, and
    as many of the likeliest as are asked for. Token i has the logits of row i, or of rows[i].
    """
    if rows is None:
        rows = range(len(tokens))
    tops = native.tops(logits_RV, rows, num_tops)
    logprobs_R = logits_RV[list(rows), list(tokens)] - tops.log_totals_R
    return [
        PositionLogprobs(token, logprob, _alternatives(tops, i))
        for i, (token, logprob) in enumerate(zip(tokens, logprobs_R.tolist(), strict=True))
    ]


def _alternatives(tops: native.Tops, i: int) -> tuple[Alternative, ...]:
    num = tops.num_R[i]
    logprobs = tops.logits_RT[i, :num] - tops.log_totals_R[i]
    return tuple(map(Alternative, tops.ids_RT[i, :num].tolist(), logprobs.tolist()))


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """For each seed, the number in [0, 1) of the answer's token at that position, from 0."""
    states = _splitmix64(np.array(seeds, np.uint64), np.zeros(len(seeds), np.uint64))
    bits = _splitmix64(states, np.array(positions, np.uint64))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sequence_seed(seed: int, index: int) -> int:
    """The seed of the `index`-th answer to one request; the first answer has the request's own."""
    if index == 0:
        return seed
    return int(_splitmix64(np.array([seed], np.uint64), np.array([index], np.uint64))[0])


def _splitmix64(seeds: UInt64Array, indices: UInt64Array) -> UInt64Array:
    # Arrays, not scalars: numpy warns about wrapping around for scalars only.
    x = seeds + (indices + np.uint64(1)) * _GAMMA
    x = (x ^ (x >> np.uint64(30))) * _FACTORS[0]
    x = (x ^ (x >> np.uint64(27))) * _FACTORS[1]
    scrambled: UInt64Array = x ^ (x >> np.uint64(31))
    return scrambled
