"""Which matrices of a checkpoint are quantized, and a description of what became of them.

Knows: which weights are quantized at the source, which kind a matrix has that nothing is known
about. Does not know: the algorithms (export/quantize/quantizers.py), the layout
(export/quantize/quill_layout.py).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from quill.export.errors import UnsupportedModelError
from quill.export.quantize.quantizers import FoundKind, Quantized, inputs_of, quantize
from quill.export.quantize.quill_layout import InputBits, OperatorWeight
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.checkpoint.quantized_weight import QuantizedWeight, row_counts
from quill.model.checkpoint.tensors import Lazy, LazyTensor, Tensors, lazy

EMBEDDING = "embedding.weight"
# Tables that are added, not multiplied, gain no speed. A recurrent encoder's loop multiplies in
# float32. Routers and gates decide by small differences, latent attention's matrices are small, and
# a short convolution's weights are a few for each channel.
NOT_QUANTIZED = re.compile(
    r"(decoder_)?(position|segment)_embedding\.weight|(en|de)coder_relative\.weight|head\.out\.weight"
    r"|encoder\.\d+\.\d+\.state\.weight"
    r"|.*\.router\.weight|.*\.gate_1D|.*\.attention\.(up\.weight|kernel_DL)"
)
# The vocabulary projection decides between nearly equal logits: 4 bits there cost the most quality.
VOCABULARY = (EMBEDDING, "projection.weight")
_LAYER = re.compile(r"\w+\.(\d+)\.(.*)")

MAX_WEIGHT = 65504.0  # of float16, in which scales and minima are kept


@dataclass(frozen=True)
class Quantization:
    """The integers of every matrix, and a description of their origin."""

    weights: Mapping[str, OperatorWeight]
    description: str
    is_source: bool  # all are the source's: PyTorch computes with the same values


def is_quantized(name: str, num_dimensions: int) -> bool:
    """Whether a tensor of the checkpoint becomes integers."""
    return num_dimensions == 2 and not NOT_QUANTIZED.fullmatch(name)


def from_source(source: QuantizedWeight | None, bits: Literal[4, 8]) -> OperatorWeight | None:
    """The source's integers, where there are any: quantizing twice ruins a model."""
    return None if source is None else OperatorWeight(source, input_bits(bits))


def default_kind(name: str, bits: Literal[4, 8]) -> FoundKind:
    """Of a matrix that nothing is known about."""
    return "q8_0" if bits == 8 or name in VOCABULARY else "q4_1"


def quantize_floats(
    name: str, weight_NI: Tensor, kind: FoundKind, moments_KCC: Tensor | None = None
) -> Quantized:
    """A matrix, and its squared error relative to the weights."""
    least, largest = (float(each) for each in weight_NI.aminmax())
    if not (least >= -MAX_WEIGHT and largest <= MAX_WEIGHT):  # also when they are NaN
        raise UnsupportedModelError(
            f"tensor {name} has weights beyond {MAX_WEIGHT:.0f}, or ones that aren't numbers; "
            "quantized ones must be within it. Export with --precision fp32"
        )
    return quantize(kind, weight_NI, None if moments_KCC is None else inputs_of(moments_KCC))


def input_bits(bits: Literal[4, 8]) -> InputBits:
    """How finely the inputs of matrices are rounded."""
    return 16 if bits == 8 else 8


def describe(
    kinds: Mapping[str, str],
    losses: Mapping[str, float],
    bits: float,
    calibrated: bool,
    finer: Mapping[str, str],
) -> str:
    """Where the integers come from, and the bits of a weight. Of those made here: what they lose on
    average; of calibrated ones which matrix got which kind: their errors compensate each other.
    `finer`: the kinds of some rows."""
    all_kinds = (*kinds.values(), *finer.values())
    listed = ", ".join(sorted({kind for each in all_kinds for kind, _ in row_counts(each)}))
    if not losses:
        return f"the source's own values ({listed}; {bits:.2f} bits a weight)"
    how, lost = "rounded", f"relative squared error {sum(losses.values()) / len(losses):.2g}"
    if calibrated:
        how, lost = (
            "mixed by sensitivity",
            _by_kind({name: kinds[name] for name in losses} | dict(finer)),
        )
    if len(losses) < len(kinds):
        how = f"the source's own values, and {how} for {len(losses)} matrices"
    return f"{how} ({listed}; {bits:.2f} bits a weight; {lost})"


def _by_kind(kinds: Mapping[str, str]) -> str:
    """As in "q4_0: feed_forward.up 0-7, 9; q8_0: embedding", with the numbers of layers."""
    layers: dict[str, dict[str, list[int]]] = {}
    for name, kind in kinds.items():
        found = _LAYER.fullmatch(name.removesuffix(".weight"))
        matrix, numbers = (found[2], [int(found[1])]) if found else (name[: -len(".weight")], [])
        layers.setdefault(kind, {}).setdefault(matrix, []).extend(numbers)
    return "; ".join(
        f"{kind}: "
        + ", ".join(f"{matrix} {_ranges(found)}".rstrip() for matrix, found in of.items())
        for kind, of in sorted(layers.items())
    )


def _ranges(numbers: list[int]) -> str:
    """As in "0-2, 5" for 0, 1, 2, 5."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ranges)


def dequantized(checkpoint: Checkpoint, quantization: Quantization) -> Checkpoint:
    """The checkpoint with dequantized weights."""
    entries = dict(lazy(checkpoint.weights).entries)
    reads: dict[str, Callable[[], QuantizedWeight]] = {}
    for name in quantization.weights:
        reads[name] = partial(_weight, quantization.weights, name)
        values = partial(_values, reads[name])
        entries[name] = LazyTensor(entries[name].shape, torch.float32, values)
    return replace(checkpoint, weights=Tensors(entries), quantized=Lazy(reads))


def _weight(weights: Mapping[str, OperatorWeight], name: str) -> QuantizedWeight:
    return weights[name].weight


def _values(read: Callable[[], QuantizedWeight]) -> Tensor:
    return read().dequantize()
