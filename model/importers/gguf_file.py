"""Opens a GGUF file: its metadata, and where each tensor lies.

Knows: the container, versions 2 and 3, little-endian.
Does not know: architectures, tokenizers, what the bytes of a tensor stand for.

The file comes from strangers. Every length in it is held against the bytes that are really there
before anything is read or reserved, so a damaged file is an error and not a full memory. The `gguf`
package's own reader isn't used: it doesn't check, and it takes 5 s for SmolLM2 where this takes
0.1 s.
"""

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from quill.model.checkpoint.tensors import TensorFile
from quill.model.checkpoint.typed_values import TypedValues
from quill.model.errors import CheckpointError, UnsupportedError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_LISTED = 2**24  # numbers in lists of the metadata: one byte of the file takes 17 in memory

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS |= {12: "d"}
_STRING, _ARRAY = 8, 9


class TensorInfo(NamedTuple):
    """One tensor's place in the file."""

    name: str
    kind: Any  # a GGMLQuantizationType
    shape: tuple[int, ...]  # outputs first, as torch has it
    start: int
    num_bytes: int


class GgufFile:
    """A file with a valid header. The tensors stay on disk until they are read."""

    def __init__(self, path: Path) -> None:
        try:
            header: npt.NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
            self._file = TensorFile(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"can't read {path}: {error}") from error
        reader = _HeaderReader(header.data, path)
        self.path = path
        self.metadata = TypedValues(reader.read_metadata(), str(path))
        self.tensors = reader.read_tensors()

    def rows(self, name: str, place: int = 0, num_places: int = 1) -> npt.NDArray[np.uint8]:
        """A tensor's raw bytes, one row for each output; of a stack of matrices, those of one. They
        are read anew each time: what is mapped would stay in the process's memory."""
        info = self.tensors[name]
        num_bytes = info.num_bytes // num_places
        raw = np.frombuffer(self._file.read(info.start + place * num_bytes, num_bytes), np.uint8)
        return raw.reshape(math.prod(info.shape[:-1]) // num_places, -1)


class _HeaderReader:
    def __init__(self, data: memoryview, path: Path) -> None:
        self._data = data
        self._path = path
        self._position = 0
        self._num_listed = 0
        self._check_magic()
        self._num_tensors, self._num_entries = self._number("Q"), self._number("Q")
        self._alignment = DEFAULT_ALIGNMENT

    def _check_magic(self) -> None:
        if bytes(self._take(4)) != MAGIC:
            raise CheckpointError(f"{self._path} isn't a GGUF file: it doesn't begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            raise UnsupportedError(
                f"{self._path} is GGUF version {version}, or was written for a big-endian machine; "
                f"Quill reads versions 2 and 3, little-endian. Convert the model again"
            )

    def read_metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        self._check_count(self._num_entries, 13, "metadata entries")  # a name, a type, one byte
        for _ in range(self._num_entries):
            name = self._string()
            if name in metadata:
                raise self._damaged(f"the metadata has {name!r} twice")
            metadata[name] = self._value(self._number("I"))
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!r}, not a power of two")
        self._alignment = alignment
        return metadata

    def read_tensors(self) -> dict[str, TensorInfo]:
        self._check_count(self._num_tensors, 32, "tensors")
        infos = [self._tensor_info() for _ in range(self._num_tensors)]
        data_start = -(-self._position // self._alignment) * self._alignment
        tensors: dict[str, TensorInfo] = {}
        for info in infos:
            if info.name in tensors:
                raise self._damaged(f"there are two tensors {info.name!r}")
            tensors[info.name] = placed = info._replace(start=data_start + info.start)
            if placed.start + placed.num_bytes > len(self._data):
                raise self._damaged(
                    f"tensor {info.name} of shape {info.shape} takes {placed.num_bytes:,} bytes "
                    f"from byte {placed.start:,} on, but the file has {len(self._data):,}"
                )
        return tensors

    def _tensor_info(self) -> TensorInfo:
        name = self._string()
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._damaged(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(num_dimensions)]))
        kind_number, offset = self._number("I"), self._number("Q")
        try:
            kind = GGMLQuantizationType(kind_number)
        except ValueError as error:
            raise UnsupportedError(
                f"tensor {name} of {self._path} has the number type {kind_number}, which the "
                "installed gguf package doesn't know; a newer one may"
            ) from error
        return TensorInfo(name, kind, shape, offset, self._num_bytes(name, kind, shape))

    def _num_bytes(self, name: str, kind: Any, shape: tuple[int, ...]) -> int:
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block_size:
            raise self._damaged(
                f"tensor {name} has the shape {shape}; {kind.name} needs a last dimension that is "
                f"a multiple of {block_size}"
            )
        return math.prod(shape) // int(block_size) * int(block_bytes)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        raise self._damaged(f"there is a metadata value of the unknown type {kind}")

    def _array(self) -> list[Any]:
        kind, length = self._number("I"), self._number("Q")
        if kind == _STRING:
            self._check_count(length, 8, "texts in a list")
            return [self._string() for _ in range(length)]
        if kind not in _SCALARS:
            raise self._damaged(f"there is a metadata list of the unknown type {kind}")
        code = _SCALARS[kind]
        self._check_count(length, struct.calcsize(code), "numbers in a list")
        self._num_listed += length
        if self._num_listed > MAX_LISTED:
            raise self._damaged(f"its metadata have more than {MAX_LISTED:,} numbers in lists")
        raw = self._take(length * struct.calcsize(code))
        return list(struct.unpack(f"<{length}{code}", raw))

    def _string(self) -> str:
        raw = self._take(self._number("Q"))
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise self._damaged(f"there is text that isn't UTF-8: {error}") from error

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack(f"<{code}", self._take(struct.calcsize(code)))
        return value

    def _take(self, num_bytes: int) -> memoryview:
        end = self._position + num_bytes
        if end > len(self._data):
            raise self._damaged("it ends in the middle of its header")
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def _check_count(self, count: int, min_bytes: int, what: str) -> None:
        left = len(self._data) - self._position
        if count * min_bytes > left:
            raise self._damaged(f"it claims {count:,} {what} in the {left:,} bytes that are left")

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged: {what}. Fetch it again")
