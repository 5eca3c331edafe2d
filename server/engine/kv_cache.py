"""The KV cache's memory: numbered blocks, each for the keys and values of a few tokens.

Knows: arrays, ONNX Runtime's values. Does not know: graphs, requests, which blocks are in use.

A layer has two sides, keys and values, or a convolution's inputs; layers can differ in shape. One
array for each side, whose first dimension is the block's number. Graphs are given all
of them and find a sequence's blocks through a table, so they are bound once. Memory costs only as
it is touched.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
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

# Y sides of one shape · N blocks · E numbers of one side of a block

DEVICE_ID = 0  # the first card; CUDA_VISIBLE_DEVICES says which that is

Shape = tuple[int, ...]
CacheArray = npt.NDArray[Any]  # float32 or float16


@dataclass(frozen=True)
class BlockShape:
    """What one block holds."""

    cache_type: CacheType
    sides: tuple[Shape, ...]  # keys of layer 0, values of layer 0, keys of layer 1, …

    @classmethod
    def of(cls, sizes: Sizes, graphs: Graphs) -> "BlockShape":
        layers = [
            graph_contract.block_shapes(graphs.device, *sizes.cached(layer))
            for layer in range(sizes.num_layers)
        ]
        return cls(graphs.cache_type, tuple(side for layer in layers for side in layer))

    def side_bytes(self, side: int) -> int:
        return prod(self.sides[side]) * np.dtype(self.cache_type).itemsize

    @property
    def num_bytes(self) -> int:
        return sum(self.side_bytes(side) for side in range(len(self.sides)))


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
        try:
            caches: dict[Shape, CacheArray] = {
                side: np.zeros((num, num_blocks, prod(side)), shape.cache_type)
                for side, num in Counter(shape.sides).items()
            }
        except MemoryError as error:
            raise StartError(_too_many(num_blocks, shape)) from error
        for cache_YNE in caches.values():
            small_pages(cache_YNE)
        self._caches = caches  # sides of one shape in one array, in their order
        self._num = num_blocks

    def views(self) -> list[View]:
        """To bind to the graphs' caches, in the graphs' order."""
        caches = {side: iter(cache_YNE) for side, cache_YNE in self._caches.items()}
        return [view_of(next(caches[side]).reshape(self._num, *side)) for side in self._shape.sides]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, target in copies:
            for cache_YNE in self._caches.values():
                cache_YNE[:, target] = cache_YNE[:, source]

    @property
    def block_bytes(self) -> int:
        return self._shape.num_bytes

    def read_block(self, block: int, content: npt.NDArray[np.uint8]) -> None:
        """Its bytes, whatever they mean. From any thread."""
        for sides_YE, part in self._parts(block, content):
            part[...] = sides_YE

    def write_block(self, block: int, content: npt.NDArray[np.uint8]) -> None:
        """What `read_block` gave. From any thread, as long as nobody uses the block."""
        for sides_YE, part in self._parts(block, content):
            sides_YE[...] = part

    def _parts(
        self, block: int, content: npt.NDArray[np.uint8]
    ) -> Iterator[tuple[CacheArray, CacheArray]]:
        """The block's sides of one shape, and their place in its bytes."""
        start = 0
        for cache_YNE in self._caches.values():
            sides_YE = cache_YNE[:, block]
            part = content[start : start + sides_YE.nbytes].view(sides_YE.dtype)
            start += sides_YE.nbytes
            yield sides_YE, part.reshape(sides_YE.shape)


class DeviceKVCache:
    """All blocks, in a device's memory, which only graphs can reach.

    The device may be the CPU, too: so the tests run all of this without a GPU.
    """

    def __init__(self, num_blocks: int, shape: BlockShape, device: Device) -> None:
        self._shape = shape
        self._device = device
        self._num = num_blocks
        self._copier = open_graph(identity_graph(len(shape.sides)), device, 1)
        number = np.dtype(shape.cache_type).type
        try:
            self._values = [
                onnxruntime.OrtValue.ortvalue_from_shape_and_type(
                    (num_blocks, *side), number, device, DEVICE_ID
                )
                for side in shape.sides
            ]
        except Exception as error:  # MemoryError, or what a device's allocator raises
            raise StartError(_too_many(num_blocks, shape)) from error

    def views(self) -> list[View]:
        number = np.dtype(self._shape.cache_type)
        return [
            View(self._device, DEVICE_ID, number, (self._num, *side), _address(value))
            for side, value in zip(self._shape.sides, self._values, strict=True)
        ]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Each copy is one run of a graph that only copies."""
        for source, target in copies:
            binding = self._copier.io_binding()
            for index, value in enumerate(self._values):
                size = self._shape.side_bytes(index)
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
