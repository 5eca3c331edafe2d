"""Tensors without memory in the place of weights: a graph is traced without its weights.

Knows: where the numbers of each stand-in are: in the checkpoint, or in a temporary file.
Does not know: the network, ONNX.

A stand-in has a weight's shape and type, and a single element that all places share. The tracer
hands tensors on as they are, so a stand-in's address tells which weight to write in its place.
"""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from quill.model.checkpoint.tensors import LazyTensor, TensorFile


def is_large(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether a stand-in is worthwhile. Norms and biases stay: they are fused before the network is
    traced. So do small tensors: the exporter merges equal ones of up to 1,024 elements."""
    return len(shape) > 1 and math.prod(shape) * dtype.itemsize >= 1 << 16


class StandIns:
    """Makes stand-ins, and reads what they stand for."""

    def __init__(self, directory: Path) -> None:
        path = directory / f"weights-{os.getpid()}.part"
        self._file = TensorFile(path, os.O_RDWR | os.O_CREAT)
        path.unlink()
        self._sources: dict[int, LazyTensor] = {}
        self._kept: list[Tensor] = []  # no other tensor may get the address of one

    def of(self, source: LazyTensor) -> Tensor:
        tensor = torch.empty(1, dtype=source.dtype)
        tensor.fill_(torch.nan if source.dtype.is_floating_point else 0)
        self._kept.append(tensor)
        self._sources[tensor.data_ptr()] = source
        return tensor.expand(source.shape)

    def replace(self, module: nn.Module) -> None:
        """Moves a module's large tensors, which may be computed ones, into the temporary file."""
        for part in module.modules():
            for name, tensor in list(_own_tensors(part)):
                if is_large(tensor.shape, tensor.dtype) and tensor.data_ptr() not in self._sources:
                    stand_in = self.of(self._file.append(tensor))
                    if isinstance(tensor, nn.Parameter):
                        stand_in = nn.Parameter(stand_in, requires_grad=False)
                    setattr(part, name, stand_in)

    def read(self, tensor: Tensor) -> Tensor:
        """What a stand-in stands for; any other tensor as it is."""
        source = self._sources.get(tensor.data_ptr())
        return tensor if source is None else source.read()


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)
