"""Chooses a token for every row of a step.

Knows: logits, each row's sampling, seed and position. Does not know: caches, text, time.

The same rules as the reference, model/reference/sampling.py, and the same tokens, only faster. They
are written twice on purpose: the reference is the oracle that tests compare with. The second time
is export/operators/kernels/sampling.cpp; what it finds too close to call is sampled exactly here.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quill.server.outputs import Alternative, PositionLogprobs
from quill.server.request import SamplingParams
from quill.server.sampling import native
from quill.server.sampling.native import Logits, Mask
from quill.server.sampling.penalties import Adjustments

# R rows · D draws · V vocabulary


class Draw(NamedTuple):
    """All that a row's next token depends on, beside its logits."""

    sampling: SamplingParams
    seed: int
    position: int  # in the answer, from 0
    adjustments: Adjustments | None  # None: the sampling adjusts nothing
    mask: Mask | None = None  # None: every token may be chosen


class Choices(NamedTuple):
    """What was drawn."""

    tokens: list[int]
    broken: set[int]  # draws whose logits weren't finite: their tokens mean nothing


def choose(logits_RV: Logits, draws: Sequence[Draw], rows: Sequence[int] | None = None) -> Choices:
    """A token for each draw. Draw i is from row i, or from rows[i]: several may be from one."""
    if rows is None:
        rows = range(len(logits_RV))
    us = _uniforms(draws)
    fields = [_fields(*each) for each in zip(rows, draws, us, strict=True)]
    chosen = native.choose(logits_RV, fields)
    for i in chosen.in_doubt:
        chosen.tokens[i] = _exactly(logits_RV[rows[i]], draws[i], us[i])
    return Choices(chosen.tokens, {*chosen.broken})


def _uniforms(draws: Sequence[Draw]) -> list[float]:
    if all(each.sampling.temperature == 0 for each in draws):
        return [0.0] * len(draws)  # nobody looks at them
    us: list[float] = uniforms(
        [each.seed for each in draws], [each.position for each in draws]
    ).tolist()
    return us


def _fields(row: int, each: Draw, u: float) -> native.DrawFields:
    sampling, adjustments = each.sampling, each.adjustments
    fields = native.DrawFields(
        *(row, sampling.temperature, sampling.top_p, sampling.min_p, u),
        native.top_k_field(sampling.top_k),
        *(sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty),
        *(() if adjustments is None else adjustments.addresses()),
    )
    return fields if each.mask is None else fields._replace(mask=each.mask.ctypes.data)


def _exactly(logits_V: Logits, each: Draw, u: float) -> int:
    sampling = each.sampling
    settings = RowSettings(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, u)
    return draw_exactly(logits_V, each.adjustments, settings, each.mask)


# V vocabulary · C candidates, best first


class RowSettings(NamedTuple):
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    u: float


def draw_exactly(
    logits_V: Logits,
    adjustments: Adjustments | None,
    settings: RowSettings,
    mask: Mask | None = None,
) -> int:
    """Rules 5 to 10 of model/reference/sampling.py. Sorts values only; the id is looked up at the
    end."""
    scores_V = logits_V.astype(np.float64)
    if adjustments is not None:
        scores_V[adjustments.ids()] = adjustments.scores(logits_V)
    if mask is not None:
        bits = np.unpackbits(mask.view(np.uint8), count=len(scores_V), bitorder="little")
        scores_V[bits == 0] = -np.inf
    scores_C = np.sort(scores_V)[::-1].copy()
    with np.errstate(over="ignore"):  # a tiny temperature gives exp(-inf) = 0, as it should
        weights_C = np.exp((scores_C - scores_C[0]) / settings.temperature)
    sums_C = np.cumsum(weights_C)
    num_kept = min(len(sums_C), settings.top_k or len(sums_C))
    if settings.top_p < 1:
        num_kept = int(np.argmax(sums_C >= settings.top_p * sums_C[num_kept - 1])) + 1
    num_kept = min(num_kept, int(np.count_nonzero(weights_C >= settings.min_p)))
    rank = int(np.argmax(sums_C > settings.u * sums_C[num_kept - 1]))
    equals = np.flatnonzero(scores_V == scores_C[rank])  # by id
    return int(equals[rank - np.count_nonzero(scores_V > scores_C[rank])])


# R rows · V vocabulary · T most tops


def position_logprobs(
    logits_RV: Logits,
    tokens: Sequence[int],
    num_tops: Sequence[int],
    rows: Sequence[int] | None = None,
) -> list[PositionLogprobs]:
    """For each row: its token, and as many of the likeliest tokens as are asked for.

    Token i is of row i, or of rows[i].
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


_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))

UInt64Array = npt.NDArray[np.uint64]


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
