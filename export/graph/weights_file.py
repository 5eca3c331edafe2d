"""One file of raw weights beside the graphs, each distinct tensor written once.

Knows: ONNX external data. Does not know: which graphs share it, or why.

An encoder and a decoder that share an embedding refer to the same bytes. The graphs themselves
stay small, far from the 2 GB that a protobuf message can hold.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import onnx_ir as ir
import torch

from quill.export.graph.stand_ins import StandIns
from quill.model.checkpoint.tensors import raw_bytes

INLINE_BYTES = 1024  # smaller tensors (shapes, scalars, norms of tiny models) stay in the graph
ALIGNMENT = 64


class WeightsFile:
    """Moves tensors out of graphs into one file, each distinct one once."""

    def __init__(self, path: Path, stand_ins: StandIns) -> None:
        self._path = path
        self._file = path.open("xb")
        self._stand_ins = stand_ins
        self._offsets: dict[bytes, int] = {}

    def take(
        self, model: ir.Model, shown: Callable[[list[ir.Value]], Iterable[ir.Value]] = iter
    ) -> None:
        """Moves the model's large tensors into the file; the model keeps references. `shown`
        displays the progress."""
        for value in shown(list(model.graph.initializers.values())):
            tensor = value.const_value
            assert tensor is not None
            if tensor.nbytes >= INLINE_BYTES:
                value.const_value = self._moved(tensor)

    def _moved(self, tensor: ir.TensorProtocol) -> ir.ExternalTensor:
        data: bytes | memoryview
        if isinstance(tensor, ir.TensorProtocol) and isinstance(tensor.raw, torch.Tensor):
            data = raw_bytes(self._stand_ins.read(tensor.raw))
        else:
            data = tensor.tobytes()
        assert len(data) == tensor.nbytes
        return ir.ExternalTensor(
            location=self._path.name,
            offset=self._place(data),
            length=len(data),
            dtype=tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=tensor.name or "",
            base_dir=self._path.parent,
        )

    def _place(self, data: bytes | memoryview) -> int:
        digest = hashlib.sha256(data).digest()
        if digest not in self._offsets:
            self._file.write(bytes(-self._file.tell() % ALIGNMENT))
            self._offsets[digest] = self._file.tell()
            self._file.write(data)
        return self._offsets[digest]

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def weights_file(path: Path, stand_ins: StandIns) -> Iterator[WeightsFile]:
    file = WeightsFile(path, stand_ins)
    try:
        yield file
    finally:
        file.close()
