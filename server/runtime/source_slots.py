"""What translation models look at while they write: sources, read once and parked in slots.

Knows: the encoder's graph, its contract, the slots that it fills. Does not know: the decoder,
requests.

The encoder reads one source at a time. Reading sixteen of 12 tokens together, padded to one
length, saved a tenth of the encoder's time, and cost as much where their lengths differed: a
dozen tokens keep a matrix product busy.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnxruntime

from quill.export.bundle import graph_contract
from quill.server.runtime.slots import CacheArray, Slots, bind
from quill.server.scheduler.plan import Copy

# S slots · C capacity · T tokens of the source


class Sources:
    """Slot i has the source of the row in slot i."""

    def __init__(self, encoder: onnxruntime.InferenceSession, slots: Slots) -> None:
        self._encoder = encoder
        self._slots = slots
        # A slot that was never filled counts as a source of one token: a padding row reads it.
        self._seqlens_S = np.zeros(len(slots), np.int32)
        self._total = np.ones((), np.int32)
        self._ids_1C = np.zeros((1, slots.shape.capacity), np.int64)
        self._bindings: dict[int, Any] = {}

    def encode(self, slot: int, source_ids: Sequence[int]) -> None:
        positions_T = np.arange(len(source_ids))
        self._ids_1C[0, : len(source_ids)] = source_ids
        binding = self._binding(slot)
        bind(binding.bind_input, graph_contract.SOURCE_POSITIONS, positions_T)
        self._encoder.run_with_iobinding(binding)
        self._seqlens_S[slot] = len(source_ids) - 1

    def copy(self, source: int, target: int) -> None:
        self._slots.copy(Copy(source, target, int(self._seqlens_S[source]) + 1))
        self._seqlens_S[target] = self._seqlens_S[source]

    def bind(self, binding: Any, rows: slice) -> None:
        """The parked sources of some slots, as inputs of the decoder."""
        bind(binding.bind_input, graph_contract.SOURCE_SEQLENS_K, self._seqlens_S[rows])
        bind(binding.bind_input, graph_contract.SOURCE_TOTAL_LENGTH, self._total)
        for name, cache in self._named_caches("past"):
            bind(binding.bind_input, name, cache[rows])
        for name, cache in self._named_caches("present"):
            bind(binding.bind_output, name, cache[rows])

    def prepare(self, num_rows: int) -> None:
        """Before a step of so many rows."""
        self._total[...] = self._seqlens_S[:num_rows].max() + 1

    def _binding(self, slot: int) -> Any:
        if slot not in self._bindings:
            binding = self._encoder.io_binding()
            bind(binding.bind_input, graph_contract.SOURCE_IDS, self._ids_1C)
            for name, cache in self._named_caches("present"):
                bind(binding.bind_output, name, cache[slot : slot + 1])
            self._bindings[slot] = binding
        return self._bindings[slot]

    def _named_caches(self, side: graph_contract.Side) -> Iterator[tuple[str, CacheArray]]:
        names = graph_contract.cache_names(side, self._slots.shape.num_layers, cross=True)
        return zip(names, self._slots.caches(), strict=True)
