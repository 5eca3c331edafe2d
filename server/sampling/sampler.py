"""Chooses a token for every row of a step.

Knows: logits, each row's sampling, seed and position. Does not know: caches, text, time.

The same rules as the reference, model/reference/sampling.py, and the same tokens, only faster. They
are written twice on purpose: the reference is the oracle that tests compare with. The second time
is export/operators/kernels/sampling.cpp; what it finds too close to call is decided by
server/sampling/exact_draw.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

from quill.server.request import SamplingParams
from quill.server.sampling import native
from quill.server.sampling.arrays import Logits, Mask
from quill.server.sampling.exact_draw import RowSettings, draw_exactly
from quill.server.sampling.penalties import Adjustments
from quill.server.sampling.randomness import uniforms

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
