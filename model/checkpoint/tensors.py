"""Tensors by name that are read when they are asked for, and a file of them written one by one.

Knows: safetensors. Does not know: what the tensors are for.

Nothing is cached and nothing is mapped: a file of any size is read with the memory of one tensor.
The files are checked by safetensors itself when they are opened.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from quill.model.errors import UnsupportedError

T = TypeVar("T")

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_ENTRY_BYTES = 256  # more than the header says of a tensor, names aside


class LazyTensor(NamedTuple):
    """A tensor that can be read any number of times."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


class Lazy(Mapping[str, T]):
    """Values by name, each made anew whenever it is asked for."""

    def __init__(self, reads: Mapping[str, Callable[[], T]]) -> None:
        self._reads = dict(reads)

    def __getitem__(self, name: str) -> T:
        return self._reads[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._reads

    def __iter__(self) -> Iterator[str]:
        return iter(self._reads)

    def __len__(self) -> int:
        return len(self._reads)


class Tensors(Lazy[Tensor]):
    """Tensors by name, with shapes and types that are known without reading."""

    def __init__(self, entries: Mapping[str, LazyTensor]) -> None:
        super().__init__({name: entry.read for name, entry in entries.items()})
        self.entries = dict(entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self.entries[name].dtype


def lazy(tensors: Mapping[str, Tensor]) -> Tensors:
    """The same tensors; those in memory stay there."""
    if isinstance(tensors, Tensors):
        return tensors
    return Tensors({name: _in_memory(tensor) for name, tensor in tensors.items()})


def _in_memory(tensor: Tensor) -> LazyTensor:
    return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor)


class TensorFile:
    """A file with tensors in it. It stays the same one when another gets its name."""

    def __init__(self, path: Path, flags: int = os.O_RDONLY) -> None:
        self._descriptor = os.open(path, flags, 0o600)
        self._path = path

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def append(self, tensor: Tensor) -> LazyTensor:
        """Writes a tensor at the end of the file, which is open for it."""
        start, data = os.lseek(self._descriptor, 0, os.SEEK_END), raw_bytes(tensor)
        while data:
            data = data[os.write(self._descriptor, data) :]
        return self.tensor(start, tuple(tensor.shape), tensor.dtype)

    def tensor(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> LazyTensor:
        length = math.prod(shape) * dtype.itemsize

        def read() -> Tensor:
            if length == 0:
                return torch.empty(shape, dtype=dtype)
            return torch.frombuffer(self.read(start, length), dtype=dtype).reshape(shape)

        return LazyTensor(shape, dtype, read)

    def read(self, start: int, length: int) -> bytearray:
        data, done = bytearray(length), 0
        while done < length:
            num_read = os.preadv(self._descriptor, [memoryview(data)[done:]], start + done)
            if num_read == 0:
                raise OSError(f"{self._path} ends too early: it was changed while it was read")
            done += num_read
        return data


def open_safetensors(path: Path) -> tuple[Tensors, dict[str, str]]:
    """The tensors of a file, and its metadata. A damaged file is a SafetensorError."""
    with safe_open(path, framework="pt") as checked:
        parts = [(name, checked.get_slice(name)) for name in checked.offset_keys()]
        specs = [(name, part.get_shape(), part.get_dtype()) for name, part in parts]
        metadata = dict(checked.metadata() or {})
    file, entries = TensorFile(path), {}
    start = 8 + int.from_bytes(file.read(0, 8), "little")
    for name, shape, code in specs:  # in the order of the file, which has no holes
        if code not in DTYPES:
            raise UnsupportedError(
                f"tensor {name} in {path} is of type {code}; Quill reads {', '.join(DTYPES)}"
            )
        entries[name] = file.tensor(start, tuple(shape), DTYPES[code])
        start += math.prod(shape) * DTYPES[code].itemsize
    return Tensors(entries), metadata


def raw_bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes, which aren't copied where they are in order already."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data


def write_safetensors(
    path: Path,
    names: Iterable[str],
    tensors: Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes tensors as they come. `names`: all of theirs, or some more. `metadata` is for some of
    these names, and is read at the end."""
    header: dict[str, Any] = {}
    room = 64 + sum(2 * len(json.dumps(name)) + _ENTRY_BYTES for name in names)
    room = -(-room // 8) * 8
    with path.open("wb") as file:
        file.seek(8 + room)
        start = 0
        for name, tensor in tensors:
            data = raw_bytes(tensor)
            header[name] = {
                "dtype": _CODES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, start + len(data)],
            }
            file.write(data)
            start += len(data)
        if metadata:
            header["__metadata__"] = dict(metadata)
        text = json.dumps(header).encode()
        assert len(text) <= room
        file.seek(0)
        file.write(room.to_bytes(8, "little") + text.ljust(room))
