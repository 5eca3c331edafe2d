"""Runs the decoder's graph over slots.

Knows: ONNX Runtime, the graph's contract. Does not know: requests, sampling, why a row is where
it is. What is special about encoder–decoders is in server/runtime/source_slots.py.

Caches are bound to the slots' memory once for each number of rows; the graph extends them in
place. Between two decode steps only a few small integers change: binding 60 caches anew from
Python would cost almost as much as a small model's step. A device copies those integers when they
are bound and never looks at them again, so there they are bound for each step.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import onnxruntime

from quill.export.bundle import graph_contract
from quill.server.runtime.device_slots import DeviceCache, DeviceSlots
from quill.server.runtime.slots import CacheArray, Slots, bind
from quill.server.runtime.source_slots import Sources
from quill.server.sampling.arrays import Logits
from quill.server.scheduler.batch_invariance import padded as padded_to_tiles
from quill.server.scheduler.plan import Copy

# R rows · T new tokens · L logits · V vocabulary


class Session(Protocol):
    """What the engine needs of a model. Slot i is row i of a decode step."""

    def prefill(self, slot: int, start: int, ids: Sequence[int], wanted: Sequence[int]) -> Logits:
        """Reads tokens into a slot, from position `start`. Logits after ids[i] for wanted i.

        None may be wanted: the vocabulary projection is a fifth of a small model's work.
        """

    def decode(self, ids: Sequence[int], lengths: Sequence[int]) -> Logits:
        """Reads one token into each of the first slots, which hold `lengths` positions so far.

        The logits are good until the next step; the caller may overwrite them.
        """

    def encode(self, slot: int, source_ids: Sequence[int]) -> None:
        """The encoder reads a source and parks what decoding looks at in a slot."""

    def copy(self, copy: Copy) -> None:
        """Copies some positions of a slot into another."""

    def read(self, slot: int, start: int, stop: int) -> CacheArray:
        """A copy of some positions of a slot."""

    def write(self, slot: int, start: int, positions: CacheArray) -> None:
        """Puts back what was read before, into any slot."""


class OrtSession:
    """A decoder with its slots, and the sources that it translates if there is an encoder.

    With `pad`, no row of a step is alone in its tile, nor a position whose logits are wanted: in
    int4 it would get another answer (server/scheduler/batch_invariance.py). Without, a lone row is
    faster.
    """

    def __init__(
        self,
        decoder: onnxruntime.InferenceSession,
        slots: Slots | DeviceSlots,
        vocab_size: int,
        pad: bool,
        sources: Sources | None = None,
    ) -> None:
        self._decoder = decoder
        self._slots = slots
        self._on_device = isinstance(slots, DeviceSlots)
        self._vocab_size = vocab_size
        self._pad = pad
        self._sources = sources
        self._held = np.zeros(len(slots), np.int32)  # positions written in each slot
        self._ids_R1 = np.zeros((len(slots), 1), np.int64)
        self._seqlens_R = np.zeros(len(slots), np.int32)
        self._total = np.zeros((), np.int32)
        self._indices_R = np.arange(len(slots))
        self._logits_RV = np.zeros((len(slots), vocab_size), np.float32)
        self._decode_bindings: dict[int, Any] = {}
        self._prefill_bindings: dict[int, Any] = {}

    def prefill(self, slot: int, start: int, ids: Sequence[int], wanted: Sequence[int]) -> Logits:
        ids_1T = np.array([ids], np.int64)
        stop = start + len(ids)
        # No kernel of a device is trusted with an empty product.
        num_padding = max(self._padded(len(wanted)), int(self._on_device)) - len(wanted)
        indices_L = np.array([*wanted, *[len(ids) - 1] * num_padding], np.int64)
        logits_LV = np.empty((len(indices_L), self._vocab_size), np.float32)
        self._seqlens_R[slot] = stop - 1
        self._total[...] = stop
        binding = self._prefill_binding(slot)
        bind(binding.bind_input, graph_contract.INPUT_IDS, ids_1T)
        bind(binding.bind_input, graph_contract.LOGIT_INDICES, indices_L)
        bind(binding.bind_output, graph_contract.LOGITS, logits_LV)
        self._decoder.run_with_iobinding(binding)
        self._held[slot] = stop
        return logits_LV[: len(wanted)]

    def decode(self, ids: Sequence[int], lengths: Sequence[int]) -> Logits:
        num_rows, padded = len(ids), self._padded(len(ids))
        self._ids_R1[:num_rows, 0] = ids
        self._seqlens_R[:num_rows] = lengths
        # A padding row writes where it does no harm: behind what its slot holds. That slot may be
        # free, or have a prompt that is read only in part; the next chunk overwrites it.
        last = self._slots.shape.capacity - 1
        self._seqlens_R[num_rows:padded] = np.minimum(self._held[num_rows:padded], last)
        self._total[...] = self._seqlens_R[:padded].max() + 1
        if self._sources is not None:
            self._sources.prepare(padded)
        self._decoder.run_with_iobinding(self._decode_binding(padded))
        self._held[:num_rows] = self._seqlens_R[:num_rows] + 1
        return self._logits_RV[:num_rows]

    def encode(self, slot: int, source_ids: Sequence[int]) -> None:
        assert self._sources is not None, "a causal model has no encoder"
        self._sources.encode(slot, source_ids)
        self._held[slot] = 0

    def copy(self, copy: Copy) -> None:
        self._slots.copy(copy)
        self._held[copy.target] = copy.stop
        if self._sources is not None and copy.with_source:
            self._sources.copy(copy.source, copy.target)

    def read(self, slot: int, start: int, stop: int) -> CacheArray:
        assert isinstance(self._slots, Slots), "nothing is kept of what is on a device"
        return self._slots.read(slot, start, stop)

    def write(self, slot: int, start: int, positions: CacheArray) -> None:
        assert isinstance(self._slots, Slots), "nothing is kept of what is on a device"
        self._slots.write(slot, start, positions)
        self._held[slot] = start + positions.shape[2]

    def _padded(self, num: int) -> int:
        return padded_to_tiles(num) if self._pad else num

    def _decode_binding(self, num_rows: int) -> Any:
        rows = slice(0, num_rows)
        is_new = num_rows not in self._decode_bindings
        if is_new:
            binding = self._bind_rows(rows)
            bind(binding.bind_input, graph_contract.LOGIT_INDICES, self._indices_R[rows])
            bind(binding.bind_output, graph_contract.LOGITS, self._logits_RV[rows])
            self._decode_bindings[num_rows] = binding
        binding = self._decode_bindings[num_rows]
        if is_new or self._on_device:
            bind(binding.bind_input, graph_contract.INPUT_IDS, self._ids_R1[rows])
            self._bind_lengths(binding, rows)
        return binding

    def _prefill_binding(self, slot: int) -> Any:
        rows = slice(slot, slot + 1)
        is_new = slot not in self._prefill_bindings
        if is_new:
            self._prefill_bindings[slot] = self._bind_rows(rows)
        binding = self._prefill_bindings[slot]
        if is_new or self._on_device:
            self._bind_lengths(binding, rows)
        return binding

    def _bind_lengths(self, binding: Any, rows: slice) -> None:
        bind(binding.bind_input, graph_contract.SEQLENS_K, self._seqlens_R[rows])
        bind(binding.bind_input, graph_contract.TOTAL_LENGTH, self._total)

    def _bind_rows(self, rows: slice) -> Any:
        """The caches of some slots, as past and as present: the graph extends them in place."""
        binding = self._decoder.io_binding()
        num_layers = self._slots.shape.num_layers
        names = zip(
            graph_contract.cache_names("past", num_layers),
            graph_contract.cache_names("present", num_layers),
            strict=True,
        )
        caches: Sequence[CacheArray | DeviceCache] = self._slots.caches()
        for (past, present), cache in zip(names, caches, strict=True):
            bind(binding.bind_input, past, cache[rows])
            bind(binding.bind_output, present, cache[rows])
        if self._sources is not None:
            self._sources.bind(binding, rows)
        return binding
