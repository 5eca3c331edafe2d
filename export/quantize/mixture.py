"""Chooses the kind of each matrix: the fewest bits where the model notices least.

Knows: the inputs and gradients of each matrix on calibration text, kinds, their sizes.
Does not know: the network, how the statistics were collected (export/verify/calibration.py).

To second order, the KL divergence that an error of a matrix causes is half the error of its outputs
squared, weighted by the mean squared gradients of the log-likelihood (the Fisher information). The
predictions of all matrices are added. Predicted and found for all of SmolLM2's layers in q4_0:
0.148 and 0.176; in q5_0: 0.036 and 0.044.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

from torch import Tensor

from quill.export.quantize.quantization import VOCABULARY
from quill.export.quantize.quantizers import FoundKind, inputs_of, quantize
from quill.export.quantize.quill_layout import layout_bits
from quill.model.checkpoint.quantized_weight import FORMATS

# N outputs · I inputs · K spans of inputs · C inputs of a span · R rows that are tried

FREE_BITS = 5.0  # of a weight, on average, that are always spent
MAX_BITS = 6.5  # more are no longer fast: 8 bits lose nothing then
NUM_TRIED = 48  # rows of a matrix that are quantized in every kind
# The kind of those rows of the vocabulary's matrices that matter most. The most frequent 3% of the
# tokens of stories15M have 92% of the Fisher information: 8 bits for them leave a twentieth of what
# is lost with 4 bits for all.
FINER: FoundKind = "q8_0"
FINER_SHARES = (1 / 128, 1 / 64, 1 / 32, 1 / 16, 1 / 8)


class Statistics(NamedTuple):
    """What calibration text tells about a matrix."""

    outputs_N: Tensor  # mean squared gradients of the log-likelihood
    moments_KCC: Tensor  # mean products of pairs of inputs; tokens are weighted by their gradients


class Option(NamedTuple):
    """A matrix in one kind."""

    name: str
    kind: FoundKind
    num_bits: float  # of the whole matrix
    loss: float  # nats, predicted
    num_finer: int = 0  # rows that are in FINER, too


def options(name: str, weight_NI: Tensor, statistics: Statistics) -> list[Option]:
    """A matrix in every kind. The rows that matter most are tried."""
    outputs_N, moments_KCC = statistics
    rows_R = outputs_N.topk(min(NUM_TRIED, len(outputs_N))).indices
    tried_RI, outputs_R = weight_NI[rows_R].float(), outputs_N[rows_R]
    outputs_R *= 0.5 * outputs_N.sum() / outputs_R.sum().clamp_min(1e-30)
    inputs, found = inputs_of(moments_KCC), []
    kinds: tuple[FoundKind, ...] = get_args(FoundKind)
    for kind in kinds:
        if weight_NI.shape[1] % FORMATS[kind].size:
            continue
        error_RI = quantize(kind, tried_RI, inputs).weight.dequantize() - tried_RI
        loss = float(outputs_R @ _squares(error_RI, moments_KCC))
        found.append(Option(name, kind, layout_bits(kind) * weight_NI.numel(), loss))
    if name in VOCABULARY:
        found += _with_finer_rows(found, weight_NI.shape, outputs_N)
    return found


def _with_finer_rows(
    found: Sequence[Option], shape: Sequence[int], outputs_N: Tensor
) -> Iterator[Option]:
    """Each kind with some of the rows in FINER. A row loses as much as it matters."""
    losses = {option.kind: option.loss for option in found}
    shares_N = outputs_N.sort(descending=True).values.cumsum(0) / outputs_N.sum().clamp_min(1e-30)
    for option, share in itertools.product(found, FINER_SHARES):
        num = int(share * shape[0])
        if num == 0 or option.kind == FINER:
            continue
        of_finer = float(shares_N[num - 1])
        yield option._replace(
            num_bits=option.num_bits + layout_bits(FINER) * num * shape[1],
            loss=(1 - of_finer) * option.loss + of_finer * losses[FINER],
            num_finer=num,
        )


def finer_rows(statistics: Statistics, num: int) -> Tensor:
    """The rows that matter most."""
    order_N = statistics.outputs_N.argsort(descending=True, stable=True)
    return order_N[:num].sort().values


def _squares(error_RI: Tensor, moments_KCC: Tensor) -> Tensor:
    """The mean square of each output's error."""
    error_KRC = error_RI.unflatten(1, moments_KCC.shape[:2]).transpose(0, 1)  # type: ignore[no-untyped-call]
    squares_R: Tensor = ((error_KRC @ moments_KCC) * error_KRC).sum(dim=(0, 2))
    return squares_R


class Mixture(NamedTuple):
    """A kind for each matrix."""

    kinds: Mapping[str, FoundKind]
    num_finer: Mapping[str, int]
    loss: float  # nats, predicted
    bits: float  # of a weight, on average


def choose(matrices: Iterable[Sequence[Option]], max_loss: float) -> Mixture:
    """A greedy knapsack: the step that saves the most nats a bit comes first, as long as FREE_BITS
    are left for it; more, up to MAX_BITS, as long as more than `max_loss` is lost."""
    chosen: dict[str, Option] = {}
    steps: list[tuple[Option, Option]] = []
    num_weights = 0.0
    for of_one in matrices:
        hull = _hull(of_one)
        chosen[hull[0].name] = hull[0]
        steps += itertools.pairwise(hull)
        num_weights += hull[0].num_bits / layout_bits(hull[0].kind)
    loss = sum(option.loss for option in chosen.values())
    num_bits = sum(option.num_bits for option in chosen.values())
    for before, after in sorted(steps, key=lambda step: _gain(*step), reverse=True):
        more = num_bits + after.num_bits - before.num_bits
        fits = more <= num_weights * (FREE_BITS if loss <= max_loss else MAX_BITS)
        if not fits or chosen[after.name] is not before:  # its step before didn't fit
            continue
        chosen[after.name], num_bits = after, more
        loss -= before.loss - after.loss
    kinds = {name: option.kind for name, option in chosen.items()}
    num_finer = {name: option.num_finer for name, option in chosen.items() if option.num_finer}
    return Mixture(kinds, num_finer, loss, num_bits / num_weights)


def _gain(before: Option, after: Option) -> float:
    return (before.loss - after.loss) / (after.num_bits - before.num_bits)


def _hull(of_one: Sequence[Option]) -> list[Option]:
    """The kinds of a matrix that are worth their bits: each step gains less than the one before."""
    hull: list[Option] = []
    for option in sorted(of_one, key=lambda option: option.num_bits):
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], option):
            hull.pop()
        if not hull or option.loss < hull[-1].loss:
            hull.append(option)
    return hull
