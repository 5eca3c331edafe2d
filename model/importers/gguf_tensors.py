"""Turns the raw rows of GGUF tensors into weights.

Knows: which block formats Quill keeps as they are; for the others, the `gguf` package.
Does not know: which tensor is which.
"""

from collections.abc import Sequence
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


def keep(sources: Sequence[Source]) -> QuantizedWeight:
    """Tensors of one width as one matrix, row after row, as the source has them. All are of kinds
    that are kept, even of several."""
    return stack_rows([Rows(KEPT[source.kind], source.raw_N) for source in sources])


def decode(*sources: Source) -> Tensor:
    """The same in float32, of any kinds."""
    if all(source.kind in KEPT for source in sources):
        return keep(sources).dequantize()
    values_NI = np.concatenate([_dequantize(source) for source in sources])
    return torch.from_numpy(np.require(values_NI, np.float32, ["C", "W"]))


def _dequantize(source: Source) -> Any:
    try:
        return gguf.dequantize(source.raw_N, source.kind)
    except NotImplementedError as error:
        raise UnsupportedError(
            f"tensor {source.name} is stored as {source.kind.name}, which the gguf package can't "
            "turn into numbers; use a file in F32, F16, BF16, Q8_0, Q6_K, Q4_K or another "
            "quantization"
        ) from error
