"""Runs a bundle's graphs the plain way: slots of cache, prefill, decode.

Knows: the graphs' contract, IOBinding with caches updated in place.
Does not know: PyTorch, requests, sampling, speed. Verification and measurements use it; the
server has an engine of its own.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from export import contract
from export.manifest import Graphs, Sizes

# R rows · T new tokens · L logits · V vocabulary

Array = npt.NDArray[Any]


def open_session(path: Path, num_threads: int = 0) -> onnxruntime.InferenceSession:
    """A session on the CPU provider. 0 threads: as many as there are cores."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.log_severity_level = 3  # errors only; they come as exceptions too
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


class Runner:
    """Slots and the graphs that fill them. Slot i is row i of every cache."""

    def __init__(
        self, directory: Path, graphs: Graphs, sizes: Sizes, num_slots: int, capacity: int
    ) -> None:
        self._sizes = sizes
        self._decoder = open_session(directory / graphs.decoder)
        self._encoder = open_session(directory / graphs.encoder) if graphs.encoder else None
        shape = (num_slots, sizes.num_kv_heads, capacity, sizes.head_size)
        number = np.dtype(graphs.cache_type)
        self._caches = [np.zeros(shape, number) for _ in range(2 * sizes.num_layers)]
        self._cross = [np.zeros_like(cache) for cache in self._caches if graphs.encoder]
        self._lengths = np.zeros(num_slots, np.int32)
        self._source_lengths = np.zeros(num_slots, np.int32)

    @property
    def lengths(self) -> Array:
        """How many tokens each slot holds."""
        return self._lengths

    def keys_and_values(self, slot: int) -> list[Array]:
        """What the slot holds: key 0, value 0, key 1, … as (kv_heads, length, head_size)."""
        return [cache[slot, :, : self._lengths[slot]] for cache in self._caches]

    def parked(self, slot: int) -> list[Array]:
        """The slot's source, as keys and values in the same order."""
        return [cache[slot, :, : self._source_lengths[slot]] for cache in self._cross]

    def rewind(self, slot: int, length: int = 0) -> None:
        """Forgets what the slot holds beyond `length` tokens."""
        self._lengths[slot] = length

    def encode(self, slot: int, source: Sequence[int]) -> None:
        """Parks a source in the slot."""
        assert self._encoder is not None, "a causal model has no encoder"
        capacity = self._cross[0].shape[2]
        ids = np.zeros((1, capacity), np.int64)
        ids[0, : len(source)] = source
        binding = self._encoder.io_binding()
        _bind(binding.bind_input, contract.SOURCE_IDS, ids)
        positions = np.arange(len(source))
        _bind(binding.bind_input, contract.SOURCE_POSITIONS, positions)
        names = contract.cache_names("present", self._sizes.num_layers, cross=True)
        for name, cache in zip(names, self._cross, strict=True):
            _bind(binding.bind_output, name, cache[slot : slot + 1])
        self._encoder.run_with_iobinding(binding)
        self._source_lengths[slot] = len(source)

    def prefill(self, slot: int, ids: Sequence[int], indices: Sequence[int] | None = None) -> Array:
        """Appends tokens to a slot. Answers logits at `indices` into ids (default: the last)."""
        wanted = [len(ids) - 1] if indices is None else indices
        return self._step(slice(slot, slot + 1), np.array([ids]), np.array(wanted))

    def decode(self, ids: Sequence[int], first_slot: int = 0) -> Array:
        """Appends one token to each of several neighbouring slots; answers (R, V)."""
        rows = slice(first_slot, first_slot + len(ids))
        return self._step(rows, np.array(ids)[:, None], np.arange(len(ids)))

    def move(self, source: int, target: int) -> None:
        """Copies a slot over another: what a server does when a row ends and the last moves up."""
        for cache in (*self._caches, *self._cross):
            cache[target] = cache[source]
        self._lengths[target] = self._lengths[source]
        self._source_lengths[target] = self._source_lengths[source]

    def _step(self, rows: slice, ids_RT: Array, indices_L: Array) -> Array:
        self._lengths[rows] += ids_RT.shape[1]
        inputs: dict[str, Array] = {
            contract.INPUT_IDS: ids_RT.astype(np.int64),
            contract.LOGIT_INDICES: indices_L.astype(np.int64),
            contract.SEQLENS_K: self._lengths[rows] - 1,
            contract.TOTAL_LENGTH: np.array(self._lengths[rows].max(), np.int32),
        }
        if self._encoder is not None:
            inputs[contract.SOURCE_SEQLENS_K] = self._source_lengths[rows] - 1
            longest = self._source_lengths[rows].max()
            inputs[contract.SOURCE_TOTAL_LENGTH] = np.array(longest, np.int32)
        logits_LV = np.empty((len(indices_L), self._sizes.vocab_size), np.float32)
        binding = self._decoder.io_binding()
        for name, value in inputs.items():
            _bind(binding.bind_input, name, value)
        _bind(binding.bind_output, contract.LOGITS, logits_LV)
        self._bind_caches(binding, self._caches, rows, cross=False)
        if self._encoder is not None:
            self._bind_caches(binding, self._cross, rows, cross=True)
        self._decoder.run_with_iobinding(binding)
        return logits_LV

    def _bind_caches(
        self, binding: Any, caches: Sequence[Array], rows: slice, *, cross: bool
    ) -> None:
        """The same memory as past and present: the operator extends it in place."""
        num_layers = self._sizes.num_layers
        past, present = (contract.cache_names(side, num_layers, cross) for side in _SIDES)
        for past_name, present_name, cache in zip(past, present, caches, strict=True):
            _bind(binding.bind_input, past_name, cache[rows])
            _bind(binding.bind_output, present_name, cache[rows])


_SIDES: tuple[contract.Side, contract.Side] = ("past", "present")


def _bind(bind: Any, name: str, array: Array) -> None:
    assert array.flags.c_contiguous
    bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
