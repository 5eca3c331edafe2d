"""The memory that rows keep their keys and values in.

Knows: arrays. Does not know: graphs, requests, which slots are in use.

One array for each layer and side, (slots, kv_heads, capacity, head_size): slot i is contiguous, and
so are the first n slots. Memory costs only as it is touched, so a slot's capacity may be generous.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quill.export.bundle.manifest import CacheType, Sizes
from quill.server.errors import StartError
from quill.server.machine.huge_pages import small_pages
from quill.server.scheduler.plan import Copy

# Y layers and sides: key 0, value 0, key 1, … · S slots · K key/value heads · C capacity
# P positions · H head size

CacheArray = npt.NDArray[Any]  # float32 or float16


@dataclass(frozen=True)
class SlotShape:
    """What one slot holds."""

    num_layers: int
    num_kv_heads: int
    capacity: int  # positions
    head_size: int
    cache_type: CacheType

    @classmethod
    def of(cls, sizes: Sizes, capacity: int, cache_type: CacheType) -> "SlotShape":
        return cls(sizes.num_layers, sizes.num_kv_heads, capacity, sizes.head_size, cache_type)

    @property
    def bytes_per_position(self) -> int:
        number_size = np.dtype(self.cache_type).itemsize
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * number_size

    @property
    def bytes_per_slot(self) -> int:
        return self.capacity * self.bytes_per_position


class Slots:
    """All slots of a server."""

    def __init__(self, num_slots: int, shape: SlotShape) -> None:
        self.shape = shape
        dimensions = (
            *(2 * shape.num_layers, num_slots),
            *(shape.num_kv_heads, shape.capacity, shape.head_size),
        )
        try:
            # One array for all layers, so that a copy between slots is one call.
            self._caches_YSKCH: CacheArray = np.zeros(dimensions, shape.cache_type)
        except MemoryError as error:
            needed = num_slots * shape.bytes_per_slot / 2**30
            raise StartError(
                f"{num_slots} slots of {shape.capacity} tokens need {needed:.1f} GB of memory, and "
                "there isn't as much. Lower --max-slots or --context"
            ) from error
        small_pages(self._caches_YSKCH)

    def __len__(self) -> int:
        return int(self._caches_YSKCH.shape[1])

    def caches(self) -> list[CacheArray]:
        """The arrays that the graph's caches are bound to, in the graph's order."""
        return list(self._caches_YSKCH)

    def copy(self, copy: Copy) -> None:
        positions = slice(copy.start, copy.stop)
        moved = self._caches_YSKCH[:, copy.source, :, positions]
        self._caches_YSKCH[:, copy.target, :, positions] = moved

    def read(self, slot: int, start: int, stop: int) -> CacheArray:
        """A copy of some positions, as (Y, K, P, H)."""
        return self._caches_YSKCH[:, slot, :, start:stop].copy()

    def write(self, slot: int, start: int, positions_YKPH: CacheArray) -> None:
        stop = start + positions_YKPH.shape[2]
        self._caches_YSKCH[:, slot, :, start:stop] = positions_YKPH


class View(NamedTuple):
    """Some neighbouring slots of one layer and side, in the order in which bindings ask for it."""

    device: str
    device_id: int
    number_type: type
    shape: tuple[int, ...]
    address: int


def bind(bind_side: Callable[..., None], name: str, array: npt.NDArray[Any] | View) -> None:
    if isinstance(array, View):
        bind_side(name, *array)
    else:
        assert array.flags.c_contiguous
        bind_side(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
