"""The vocabulary projection in PyTorch, and how operators round a matrix's inputs.

Knows: the vocabulary's matrix, a few rows of it at a time. Does not know: layers, passages.
"""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.checkpoint.quantized_weight import BLOCK_SIZE
from quill.model.network.attention import soft_capped
from quill.model.network.network import Network
from quill.model.network.transformer import Transformer

# L tokens · V vocabulary · D model size · N outputs · I inputs

Array = npt.NDArray[Any]

LEVELS = {8: 127.0, 16: 32767.0}
VOCABULARY_ROWS = 1 << 13  # of the vocabulary's matrix that are in float32 at a time


def rounded(x: Tensor, bits: int) -> Tensor:
    """Rounds as the operators do: 32 numbers share a scale."""
    blocks = x.unflatten(-1, (-1, BLOCK_SIZE))  # type: ignore[no-untyped-call]
    scale = blocks.abs().amax(dim=-1, keepdim=True) / LEVELS[bits]
    y: Tensor = torch.where(scale > 0, (blocks / scale).round() * scale, 0.0).flatten(-2)
    return y


class Projection:
    """Hidden states become logits; the vocabulary's matrix is in float32 a few rows at a time."""

    def __init__(self, checkpoint: Checkpoint, model: Network, name: str, bits: int | None) -> None:
        self._model = model
        self._bits = bits
        self._rows = _rows_of(checkpoint, name)

    def rounding(self, bits: int | None) -> "Projection":
        """The same matrix, and inputs rounded to `bits`."""
        other = copy.copy(self)
        other._bits = bits
        return other

    @torch.no_grad()
    def __call__(self, hidden_LD: Array) -> Array:
        model, x_LD = self._model, torch.from_numpy(np.ascontiguousarray(hidden_LD))
        if model.config.num_classes:
            of_classes: Array = model.project(x_LD).numpy()
            return of_classes
        if isinstance(model, Transformer):
            x_LD = model.head(x_LD)
        if self._bits is not None:
            x_LD = rounded(x_LD, self._bits)
        bias_V, size = model.output_bias, model.config.vocab_size
        logits_LV = torch.empty(len(x_LD), size)
        for start in range(0, size, VOCABULARY_ROWS):
            end = min(start + VOCABULARY_ROWS, size)
            bias = None if bias_V is None else bias_V[start:end]
            logits_LV[:, start:end] = F.linear(x_LD, self._rows(start, end), bias)
        cap = model.config.logit_soft_cap
        found: Array = (soft_capped(logits_LV, cap) if cap else logits_LV).numpy()
        return found

    @torch.no_grad()
    def backward(self, gradient_LV: Tensor) -> Tensor:
        """The gradient of hidden states from that of logits, before they are soft-capped."""
        gradient_LD = torch.zeros(len(gradient_LV), self._model.config.d_model)
        for start in range(0, gradient_LV.shape[1], VOCABULARY_ROWS):
            end = min(start + VOCABULARY_ROWS, gradient_LV.shape[1])
            gradient_LD += gradient_LV[:, start:end] @ self._rows(start, end)
        return gradient_LD


def _rows_of(checkpoint: Checkpoint, name: str) -> Callable[[int, int], Tensor]:
    """Neighbouring rows of a matrix in float32; the matrix is kept as its source has it."""
    if name not in checkpoint.quantized:
        weight_NI = checkpoint.weights[name]
        return lambda start, end: weight_NI[start:end].float()
    weight = checkpoint.quantized[name]
    if weight.raw.ndim != 2:
        values_NI = weight.dequantize()
        return lambda start, end: values_NI[start:end]
    return lambda start, end: weight.dequantize_rows(torch.arange(start, end))
