"""What each precision is: the one table that the exporter and the server read.

Knows: names, what runs them, how far from PyTorch they may be, which goes before which. Does not
know: torch, how graphs are made (export/graph/prepare.py has a function for each name here). The
server reads it too, so it imports only the standard library.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Family = Literal["causal", "seq2seq", "encoder"]
Precision = Literal["fp32", "quill4", "quill8", "fp16"]
Device = Literal["cpu", "cuda"]

ALL_PRECISIONS: tuple[Precision, ...] = get_args(Precision)
# What a server takes by itself may have so much of PyTorch's perplexity; fp32 is beyond doubt.
MAX_PERPLEXITY_RATIO = 1.02
# The weights are the source's own integers: only the rounding of activations can raise perplexity.
MAX_RISE_FROM_SOURCE = 5e-3


@dataclass(frozen=True)
class Tolerance:
    """The largest difference from PyTorch's logits, in standard deviations of a position's logits:
    at any position, and on average over positions."""

    worst: float
    mean: float


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is true of a precision, whatever the model."""

    tolerance: Tolerance
    max_rise: float | None  # of perplexity over PyTorch's; None: it is reported
    max_tokens: int | None = None  # that perplexity is measured on; None: all there are
    device: Device = "cpu"  # a graph's blocks follow from it (export/bundle/graph_contract.py)
    is_quantized: bool = False  # in blocks, which a model's shape must allow


# Quantized graphs are compared with PyTorch on the very same (dequantized) weights: what remains is
# the rounding of activations. To 8 bits, beside 4-bit weights, that is about 0.15 on average and
# now and then much more; to 16 bits a hundredth at worst.
_ROUNDED = Tolerance(worst=math.inf, mean=0.5)
_FINELY_ROUNDED = Tolerance(worst=0.1, mean=0.02)

PRECISIONS: Mapping[Precision, Facts] = {
    "fp32": Facts(tolerance=Tolerance(worst=1e-3, mean=1e-3), max_rise=1e-4),
    # 4 bits that were found here have no limit: the server looks at what was measured.
    "quill4": Facts(tolerance=_ROUNDED, max_rise=None, is_quantized=True),
    "quill8": Facts(tolerance=_FINELY_ROUNDED, max_rise=5e-3, is_quantized=True),
    # Half precision has no fast kernel on a CPU: a few hundred tokens must do. Only cards have its
    # attention; without one it is proven with Quill's own in its place.
    "fp16": Facts(
        tolerance=Tolerance(worst=0.2, mean=0.02), max_rise=5e-3, max_tokens=400, device="cuda"
    ),
}

# For the CPU, the best first. Two cores of an EPYC with AVX2: tokens/s of 1, 8 and 32 rows, and how
# much perplexity rises over float32's.
#     SmolLM2, 4 bits at its source, one run; perplexity on 13,814 tokens, in pairs:
#         quill4 196, 759, 932, +0.23% ± 0.06%    quill8 141, 590, 639, 0.00%
#     seq2seq-tiny after 329 steps of en-de, medians of nine runs that spread by a factor of 2:
#         quill4 2237, 4213, 4982, +0.44%     quill8 2085, 4529, 5915, +0.04%
# So a translator, whose weights come in full precision, loses less with 8 bits, and no difference
# of speed can be told. An encoder's vectors are held against those that others made of the same
# model: 8 bits move them (BERT of 6 layers of 384: a cosine of 0.99999, bert-tiny trained: 0.99995)
# and bring a tenth of speed (171 texts a second, fp32 153).
_FASTEST: Mapping[Family, tuple[Precision, ...]] = {
    "causal": ("quill4", "quill8", "fp32"),
    "seq2seq": ("quill8", "quill4", "fp32"),
    "encoder": ("fp32", "quill8", "quill4"),
}


def preferred(family: Family, *, fast_operators: bool) -> tuple[Precision, ...]:
    """All precisions for the CPU, the best first. Without fast kernels of Quill's own, integers
    come last: fp32 leaves the matrices to the runtime."""
    order = _FASTEST[family]
    if fast_operators:
        return order
    return tuple(sorted(order, key=lambda name: PRECISIONS[name].is_quantized))


def family_problem(precision: Precision, family: Family) -> str | None:
    """Why a family has no such graphs, in words."""
    if PRECISIONS[precision].device == "cpu" or family == "causal":
        return None
    if family == "encoder":
        return f"an encoder has no {precision} graphs: its attention is Quill's own, for the CPU"
    return (
        f"a translator has no {precision} graphs: the runtime's attention over blocks on CUDA "
        "writes into the blocks that it reads, so it can't look at a source's"
    )
