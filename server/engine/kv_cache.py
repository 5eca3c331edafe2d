"""The KV cache's memory: numbered blocks, each for the keys and values of a few tokens.

Knows: arrays, ONNX Runtime's values. Does not know: graphs, requests, which blocks are in use.

One array for each layer and side, whose first dimension is the block's number. Graphs are given all
of them and find a sequence's blocks through a table, so they are bound once. Memory costs only as
it is touched.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime

from quill.export.bundle import graph_contract
from quill.export.bundle.manifest import CacheType, Graphs, Sizes
from quill.export.precisions import Device
from quill.server.errors import StartError
from quill.server.machine.memory import small_pages
from quill.server.machine.onnx_session import (
    identity_graph,
    input_name,
    open_graph,
    output_name,
)

# Y layers · N blocks · E numbers of one side of a block

DEVICE_ID = 0  # the first card; CUDA_VISIBLE_DEVICES says which that is

CacheArray = npt.NDArray[Any]  # float32 or float16


@dataclass(frozen=True)
class BlockShape:
    """What one block holds."""

    num_layers: int
    cache_type: CacheType
    key: tuple[int, ...]
    value: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Sizes, graphs: Graphs) -> "BlockShape":
        key, value = graph_contract.block_shapes(
            graphs.device, sizes.num_kv_heads, sizes.head_size, sizes.value_size
        )
        return cls(sizes.num_layers, graphs.cache_type, key, value)

    @property
    def sides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.key, self.value

    def side_bytes(self, side: int) -> int:
        """Of a block of a layer's keys (0) or values (1)."""
        return prod(self.sides[side]) * np.dtype(self.cache_type).itemsize

    @property
    def num_bytes(self) -> int:
        return self.num_layers * (self.side_bytes(0) + self.side_bytes(1))


class View(NamedTuple):
    """Some memory, with its fields in the order of a binding's arguments."""

    device: str
    device_id: int
    number_type: Any
    shape: tuple[int, ...]
    address: int


class KVCache:
    """All blocks, in the processor's memory."""

    def __init__(self, num_blocks: int, shape: BlockShape) -> None:
        self._shape = shape
        dimensions = [(shape.num_layers, num_blocks, prod(side)) for side in shape.sides]
        try:
            caches: list[CacheArray] = [np.zeros(each, shape.cache_type) for each in dimensions]
        except MemoryError as error:
            raise StartError(_too_many(num_blocks, shape)) from error
        for cache_YNE in caches:
            small_pages(cache_YNE)
        self._caches = caches  # keys, values
        self._num = num_blocks

    def views(self) -> list[View]:
        """To bind to the graphs' caches, in the graphs' order."""
        return [
            view_of(cache_YNE[layer].reshape(self._num, *side))
            for layer in range(self._shape.num_layers)
            for cache_YNE, side in zip(self._caches, self._shape.sides, strict=True)
        ]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, target in copies:
            for cache_YNE in self._caches:
                cache_YNE[:, target] = cache_YNE[:, source]


class DeviceKVCache:
    """All blocks, in a device's memory, which only graphs can reach.

    The device may be the CPU, too: so the tests run all of this without a GPU.
    """

    def __init__(self, num_blocks: int, shape: BlockShape, device: Device) -> None:
        self._shape = shape
        self._device = device
        self._num = num_blocks
        num_sides = 2 * shape.num_layers
        self._copier = open_graph(identity_graph(num_sides), device, 1)
        number = np.dtype(shape.cache_type).type
        dimensions = [(num_blocks, *side) for side in (shape.key, shape.value)]
        try:
            self._values = [
                onnxruntime.OrtValue.ortvalue_from_shape_and_type(
                    dimensions[side % 2], number, device, DEVICE_ID
                )
                for side in range(num_sides)
            ]
        except Exception as error:  # MemoryError, or what a device's allocator raises
            raise StartError(_too_many(num_blocks, shape)) from error

    def views(self) -> list[View]:
        number = np.dtype(self._shape.cache_type)
        shapes = (self._shape.key, self._shape.value)
        return [
            View(self._device, DEVICE_ID, number, (self._num, *shapes[side % 2]), _address(value))
            for side, value in enumerate(self._values)
        ]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Each copy is one run of a graph that only copies."""
        for source, target in copies:
            binding = self._copier.io_binding()
            for index, value in enumerate(self._values):
                size = self._shape.side_bytes(index % 2)
                binding.bind_input(input_name(index), *self._bytes_at(value, source, size))
                binding.bind_output(output_name(index), *self._bytes_at(value, target, size))
            self._copier.run_with_iobinding(binding)

    def _bytes_at(self, value: Any, block: int, size: int) -> View:
        address = _address(value) + block * size
        return View(self._device, DEVICE_ID, np.dtype(np.uint8), (size,), address)


def view_of(array: npt.NDArray[Any]) -> View:
    assert array.flags.c_contiguous
    return View("cpu", 0, array.dtype, array.shape, array.ctypes.data)


def _address(value: Any) -> int:
    return int(value.data_ptr())


def _too_many(num_blocks: int, shape: BlockShape) -> str:
    needed = num_blocks * shape.num_bytes / 2**30
    return f"{needed:.1f} GB of memory for the KV cache can't be had. Lower --kv-cache-mb"
