"""The table of precisions, which the exporter and the server read.

Knows: names, devices, tolerances, which precision is preferred. Does not know: torch, how graphs
are made (export/graph/prepare.py). The server imports it, so it imports only the standard library.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Family = Literal["causal", "seq2seq", "encoder"]
Precision = Literal["fp32", "quill4", "quill8", "fp16"]
Device = Literal["cpu", "cuda"]

ALL_PRECISIONS: tuple[Precision, ...] = get_args(Precision)
# The most that a server chooses by itself, as a multiple of PyTorch's perplexity; fp32 is exempt.
MAX_PERPLEXITY_RATIO = 1.01
# And the mean KL divergence, in nats, of a position's tokens from PyTorch's.
MAX_KL_DIVERGENCE = 0.02
# With the integers of a quantized source, only the rounding of activations can raise perplexity.
MAX_RISE_FROM_SOURCE = 5e-3


@dataclass(frozen=True)
class Tolerance:
    """The largest difference from PyTorch's logits, in standard deviations of a position's logits:
    at any position, and on average over positions."""

    worst: float
    mean: float


@dataclass(frozen=True, kw_only=True)
class PrecisionInfo:
    """What a precision is for every model."""

    tolerance: Tolerance
    max_rise: float | None  # of perplexity over PyTorch's; None: no limit
    max_tokens: int | None = None  # to measure perplexity on; None: all there are
    device: Device = "cpu"  # decides the layout of blocks (export/bundle/graph_contract.py)
    is_quantized: bool = False  # in blocks (export/exportability.py)


# PyTorch has the same (dequantized) weights and rounds activations as the operators do. Sums have
# another order, so that a few activations are rounded to another integer, and more of them in every
# layer. To 8 bits: 0.07 at worst in two layers, 0.41 (0.16 on average) in SmolLM2's thirty; to 16
# bits 0.001 in two layers.
_ROUNDED = Tolerance(worst=1.0, mean=0.3)
_FINELY_ROUNDED = Tolerance(worst=0.1, mean=0.02)
# Where PyTorch doesn't round: 8 bits make a difference of 0.15 on average, and sometimes much more.
UNROUNDED = Tolerance(worst=math.inf, mean=0.5)

PRECISIONS: Mapping[Precision, PrecisionInfo] = {
    "fp32": PrecisionInfo(tolerance=Tolerance(worst=1e-3, mean=1e-3), max_rise=1e-4),
    # Quantization to 4 bits at export has no limit: the server reads what was measured.
    "quill4": PrecisionInfo(tolerance=_ROUNDED, max_rise=None, is_quantized=True),
    "quill8": PrecisionInfo(tolerance=_FINELY_ROUNDED, max_rise=5e-3, is_quantized=True),
    # Half precision has no fast kernel on a CPU, so a few hundred tokens must do. Only CUDA has its
    # attention; on a CPU it is verified with Quill's attention in its place.
    "fp16": PrecisionInfo(
        tolerance=Tolerance(worst=0.2, mean=0.02), max_rise=5e-3, max_tokens=400, device="cuda"
    ),
}

# For the CPU, the best first. Two cores of an EPYC with AVX2: tokens/s of 1, 8 and 32 sequences,
# and the rise of perplexity over float32's.
#     SmolLM2, 4 bits at its source, one run; perplexity on 13,814 tokens, in pairs:
#         quill4 196, 759, 932, +0.23% ± 0.06%    quill8 141, 590, 639, 0.00%
#     seq2seq-tiny after 329 steps of en-de, medians of nine runs that spread by a factor of 2:
#         quill4 2237, 4213, 4982, +0.44%     quill8 2085, 4529, 5915, +0.04%
# A translator's weights are in full precision, so 8 bits lose less, and no difference of speed was
# measurable. An encoder's embeddings are compared with those of other servers of the same model: 8
# bits change them (cosine 0.99999 for BERT of 6 layers of 384, 0.99995 for bert-tiny) and are a
# tenth faster (171 texts a second, fp32 153).
_FASTEST: Mapping[Family, tuple[Precision, ...]] = {
    "causal": ("quill4", "quill8", "fp32"),
    "seq2seq": ("quill8", "quill4", "fp32"),
    "encoder": ("fp32", "quill8", "quill4"),
}


def preferred(family: Family, *, fast_operators: bool) -> tuple[Precision, ...]:
    """All precisions for the CPU, the best first. Without fast custom kernels quantized precisions
    come last: fp32 uses the runtime's matrix products."""
    order = _FASTEST[family]
    if fast_operators:
        return order
    return tuple(sorted(order, key=lambda name: PRECISIONS[name].is_quantized))
