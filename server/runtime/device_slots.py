"""Slots in a device's memory, which only graphs can reach.

Knows: ONNX Runtime's values, addresses. Does not know: the decoder, requests, which slots are in
use. The device may be the CPU, too: so the tests run all of this without a GPU.

Like server/runtime/slots.py: one block of memory for each layer and side, slot i contiguous, and so
are the first n slots. A copy takes the whole slot, in one run of a graph that does nothing else.
"""

import math

import numpy as np
import onnxruntime

from quill.export.precisions import Device
from quill.server.errors import StartError
from quill.server.runtime.copy_graph import identity_graph, input_name, output_name
from quill.server.runtime.onnx_session import SessionSettings, open_graph
from quill.server.runtime.slots import SlotShape, View
from quill.server.scheduler.plan import Copy

DEVICE_ID = 0  # the first card; CUDA_VISIBLE_DEVICES says which that is


class DeviceCache:
    """One layer's keys or values of all slots."""

    def __init__(self, num_slots: int, shape: SlotShape, device: Device) -> None:
        self._device = device
        self._number_type = np.dtype(shape.cache_type).type
        self._slot_shape = (shape.num_kv_heads, shape.capacity, shape.head_size)
        self.slot_bytes = math.prod(self._slot_shape) * np.dtype(shape.cache_type).itemsize
        dimensions = (num_slots, *self._slot_shape)
        self._value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
            dimensions, self._number_type, device, DEVICE_ID
        )
        # Padding rows read slots that nobody wrote: what is there must be numbers.
        self._value.update_inplace(np.zeros(dimensions, self._number_type))

    def __getitem__(self, rows: slice) -> View:
        assert rows.step is None
        shape = (rows.stop - rows.start, *self._slot_shape)
        return View(self._device, DEVICE_ID, self._number_type, shape, self._address(rows.start))

    def slot_bytes_at(self, slot: int) -> View:
        """A slot as nothing but bytes."""
        return View(self._device, DEVICE_ID, np.uint8, (self.slot_bytes,), self._address(slot))

    def _address(self, slot: int) -> int:
        return int(self._value.data_ptr()) + slot * self.slot_bytes


class DeviceSlots:
    """All slots of a server."""

    def __init__(self, num_slots: int, shape: SlotShape, device: Device) -> None:
        self.shape = shape
        self._num_slots = num_slots
        num_caches = 2 * shape.num_layers
        graph = identity_graph(num_caches)
        self._copier = open_graph(graph, SessionSettings(num_threads=1), device)
        try:
            self._caches = [DeviceCache(num_slots, shape, device) for _ in range(num_caches)]
        except Exception as error:  # MemoryError, or what a device's allocator raises
            needed = num_slots * shape.bytes_per_slot / 2**30
            raise StartError(
                f"{num_slots} slots of {shape.capacity} tokens need {needed:.1f} GB of memory on "
                f"{device}, and it can't be had. Lower --max-slots or --context"
            ) from error

    def __len__(self) -> int:
        return self._num_slots

    def caches(self) -> list[DeviceCache]:
        """What the graph's caches are bound to, in the graph's order."""
        return self._caches

    def copy(self, copy: Copy) -> None:
        """Where positions before `start` are asked to stay, they are the same in both slots."""
        if copy.start == copy.stop:
            return
        binding = self._copier.io_binding()
        for index, cache in enumerate(self._caches):
            binding.bind_input(input_name(index), *cache.slot_bytes_at(copy.source))
            binding.bind_output(output_name(index), *cache.slot_bytes_at(copy.target))
        self._copier.run_with_iobinding(binding)
