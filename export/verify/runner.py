"""Runs a bundle's graphs the plain way: slots of cache, prefill, decode.

Knows: the graphs' contract, IOBinding with caches updated in place.
Does not know: PyTorch, requests, sampling. Verification and measurements use it; the server has
an engine of its own.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime

from quill.export.bundle import graph_contract
from quill.export.bundle.manifest import Graphs, Sizes
from quill.export.operators.library import library_path

# R rows · T new tokens · L logits · V vocabulary

Array = npt.NDArray[Any]


def open_session(
    path: Path, num_threads: int = 0, operators: bool = False
) -> onnxruntime.InferenceSession:
    """A session on the CPU provider. 0 threads: as many as there are cores."""
    options = onnxruntime.SessionOptions()
    if operators:
        options.register_custom_ops_library(os.fspath(library_path()))
    options.intra_op_num_threads = num_threads
    options.log_severity_level = 3  # errors only; they come as exceptions too
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


class Step(NamedTuple):
    """Everything bound for one shape of step: only numbers change from run to run."""

    binding: Any
    inputs: dict[str, Array]
    logits_LV: Array


class Runner:
    """Slots and the graphs that fill them. Slot i is row i of every cache."""

    def __init__(
        self, directory: Path, graphs: Graphs, sizes: Sizes, num_slots: int, capacity: int
    ) -> None:
        self.capacity = capacity
        self._sizes = sizes
        operators = graphs.needs_operators
        self._decoder = open_session(directory / graphs.decoder, operators=operators)
        self._encoder = None
        if graphs.encoder is not None:
            self._encoder = open_session(directory / graphs.encoder, operators=operators)
        shape = (num_slots, sizes.num_kv_heads, capacity, sizes.head_size)
        number = np.dtype(graphs.cache_type)
        self._caches = [np.zeros(shape, number) for _ in range(2 * sizes.num_layers)]
        self._cross = [np.zeros_like(cache) for cache in self._caches if graphs.encoder]
        self._lengths = np.zeros(num_slots, np.int32)
        self._source_lengths = np.zeros(num_slots, np.int32)
        self._decode_steps: dict[tuple[int, int], Step] = {}

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
        ids_1C = np.zeros((1, self._cross[0].shape[2]), np.int64)
        ids_1C[0, : len(source)] = source
        positions_S = np.arange(len(source))
        binding = self._encoder.io_binding()
        _bind(binding.bind_input, graph_contract.SOURCE_IDS, ids_1C)
        _bind(binding.bind_input, graph_contract.SOURCE_POSITIONS, positions_S)
        names = graph_contract.cache_names("present", self._sizes.num_layers, cross=True)
        for name, cache in zip(names, self._cross, strict=True):
            _bind(binding.bind_output, name, cache[slot : slot + 1])
        self._encoder.run_with_iobinding(binding)
        self._source_lengths[slot] = len(source)

    def prefill(self, slot: int, ids: Sequence[int], indices: Sequence[int] | None = None) -> Array:
        """Appends tokens to a slot. Answers logits at `indices` into ids (default: the last)."""
        indices_L = [len(ids) - 1] if indices is None else indices
        step = self._bound(slice(slot, slot + 1), len(ids), len(indices_L))
        step.inputs[graph_contract.LOGIT_INDICES][:] = indices_L
        return self._run(step, slice(slot, slot + 1), np.array([ids]))

    def decode(self, ids: Sequence[int], first_slot: int = 0) -> Array:
        """Appends one token to each of several neighbouring slots; answers (R, V)."""
        rows = slice(first_slot, first_slot + len(ids))
        key = (first_slot, len(ids))
        if key not in self._decode_steps:
            self._decode_steps[key] = self._bound(rows, 1, len(ids))
            self._decode_steps[key].inputs[graph_contract.LOGIT_INDICES][:] = np.arange(len(ids))
        return self._run(self._decode_steps[key], rows, np.array(ids)[:, None]).copy()

    def move(self, source: int, target: int) -> None:
        """Copies a slot over another: what a server does when a row ends and the last moves up."""
        for cache in (*self._caches, *self._cross):
            cache[target] = cache[source]
        self._lengths[target] = self._lengths[source]
        self._source_lengths[target] = self._source_lengths[source]

    def _run(self, step: Step, rows: slice, ids_RT: Array) -> Array:
        self._lengths[rows] += ids_RT.shape[1]
        step.inputs[graph_contract.INPUT_IDS][:] = ids_RT
        step.inputs[graph_contract.SEQLENS_K][:] = self._lengths[rows] - 1
        step.inputs[graph_contract.TOTAL_LENGTH][...] = self._lengths[rows].max()
        if self._encoder is not None:
            step.inputs[graph_contract.SOURCE_SEQLENS_K][:] = self._source_lengths[rows] - 1
            step.inputs[graph_contract.SOURCE_TOTAL_LENGTH][...] = self._source_lengths[rows].max()
        self._decoder.run_with_iobinding(step.binding)
        return step.logits_LV

    def _bound(self, rows: slice, num_tokens: int, num_logits: int) -> Step:
        num_rows = rows.stop - rows.start
        inputs = {
            graph_contract.INPUT_IDS: np.zeros((num_rows, num_tokens), np.int64),
            graph_contract.LOGIT_INDICES: np.zeros(num_logits, np.int64),
            graph_contract.SEQLENS_K: np.zeros(num_rows, np.int32),
            graph_contract.TOTAL_LENGTH: np.zeros((), np.int32),
        }
        binding = self._decoder.io_binding()
        self._bind_caches(binding, self._caches, rows, cross=False)
        if self._encoder is not None:
            inputs[graph_contract.SOURCE_SEQLENS_K] = np.zeros(num_rows, np.int32)
            inputs[graph_contract.SOURCE_TOTAL_LENGTH] = np.zeros((), np.int32)
            self._bind_caches(binding, self._cross, rows, cross=True)
        logits_LV = np.empty((num_logits, self._sizes.vocab_size), np.float32)
        _bind(binding.bind_output, graph_contract.LOGITS, logits_LV)
        for name, value in inputs.items():
            _bind(binding.bind_input, name, value)
        return Step(binding, inputs, logits_LV)

    def _bind_caches(
        self, binding: Any, caches: Sequence[Array], rows: slice, *, cross: bool
    ) -> None:
        """The same memory as past and present: the operator extends it in place."""
        num_layers = self._sizes.num_layers
        past = graph_contract.cache_names("past", num_layers, cross)
        present = graph_contract.cache_names("present", num_layers, cross)
        for past_name, present_name, cache in zip(past, present, caches, strict=True):
            _bind(binding.bind_input, past_name, cache[rows])
            _bind(binding.bind_output, present_name, cache[rows])


def _bind(bind: Any, name: str, array: Array) -> None:
    assert array.flags.c_contiguous
    bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
