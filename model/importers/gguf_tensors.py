"""Turns the raw rows of GGUF tensors into weights.

Knows: which block formats Quill keeps as they are; for the others, the `gguf` package.
Does not know: which tensor is which.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from quill.model.checkpoint.quantized_weight import Kind, QuantizedWeight, Raw, Rows, stack_rows
from quill.model.errors import UnsupportedError

# N outputs · I inputs

KEPT: dict[Any, Kind] = {GGMLQuantizationType[kind.upper()]: kind for kind in get_args(Kind)}


class Source(NamedTuple):
    """The raw rows of one tensor. `name` is for error messages only."""

    raw_N: Raw
    kind: Any  # a GGMLQuantizationType
    name: str


@dataclass(frozen=True)
class Weight:
    """A tensor in float32, or as its source had it if that is one of the kinds that are kept."""

    floats: Tensor | None
    quantized: QuantizedWeight | None = None

    @functools.cached_property
    def values(self) -> Tensor:
        """In float32."""
        if self.floats is not None:
            return self.floats
        assert self.quantized is not None
        return self.quantized.dequantize()


def decode_rows(raw_N: Raw, kind: Any, name: str) -> Weight:
    """The numbers in raw rows of one kind."""
    return decode_stack([Source(raw_N, kind, name)])


def decode_stack(sources: Sequence[Source]) -> Weight:
    """Tensors of one width as one matrix, row after row. If all are of kinds that are kept, even of
    several, nothing is decoded."""
    if all(source.kind in KEPT for source in sources):
        parts = [Rows(KEPT[source.kind], source.raw_N) for source in sources]
        return Weight(None, stack_rows(parts))
    values_NI = np.concatenate([_dequantize(source) for source in sources])
    return Weight(torch.from_numpy(np.require(values_NI, np.float32, ["C", "W"])))


def _dequantize(source: Source) -> Any:
    try:
        return gguf.dequantize(source.raw_N, source.kind)
    except NotImplementedError as error:
        raise UnsupportedError(
            f"tensor {source.name} is stored as {source.kind.name}, which the gguf package can't "
            "turn into numbers; use a file in F32, F16, BF16, Q8_0, Q6_K, Q4_K or another "
            "quantization"
        ) from error
