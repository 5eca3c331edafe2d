"""Runs a bundle's graphs plainly: slots with a fixed range of KV cache blocks each, and encoders.

Knows: the graphs' inputs and outputs, IOBinding with caches updated in place.
Does not know: PyTorch, requests, sampling. Verification and `quill inspect --speed` use it; the
server has its engine.
"""

import math
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime

from quill.export.bundle import graph_contract
from quill.export.bundle.graph_contract import BLOCK
from quill.export.bundle.manifest import Graphs, Sizes
from quill.export.operators.library import library_path

# S sequences · T new tokens of all · B blocks of a slot · L logits · V vocabulary
# N blocks of the pool · K key/value heads · H head size · P positions of a block

Array = npt.NDArray[Any]


def open_session(path: Path, num_threads: int = 0) -> onnxruntime.InferenceSession:
    """A session on the CPU provider. 0 threads: as many as there are cores."""
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(os.fspath(library_path()))
    options.intra_op_num_threads = num_threads
    options.log_severity_level = 3  # errors only; they come as exceptions too
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


class Chunk(NamedTuple):
    """One slot's new tokens in a step, and the indices of those that need logits."""

    slot: int
    ids: Sequence[int]
    wanted: Sequence[int]


class Runner:
    """Slots and the graphs that fill them. A slot's blocks are contiguous in the pool."""

    def __init__(
        self, directory: Path, graphs: Graphs, sizes: Sizes, num_slots: int, capacity: int
    ) -> None:
        self.capacity = capacity
        self._sizes = sizes
        self._one_by_one = graphs.one_token_steps
        num_sides = 1 if graphs.encoder is None else 2
        blocks_of_slot = -(-capacity // BLOCK)
        tables = np.arange(num_sides * num_slots * blocks_of_slot, dtype=np.int32)
        self._tables = tables.reshape(num_sides, num_slots, blocks_of_slot)
        self._caches = _pool(graphs, sizes, tables.size)
        assert graphs.decoder is not None, "EncoderRunner runs encoders"
        self._decoder = open_session(directory / graphs.decoder)
        self._decoding = self._bound(self._decoder)
        self._encoder, self._encoding = None, None
        if graphs.encoder is not None:
            self._encoder = open_session(directory / graphs.encoder)
            self._encoding = self._bound(self._encoder)
        self._has_hidden = graphs.hidden
        self.hidden_LD: Array = np.empty((0, sizes.d_model), np.float32)
        self._lengths = np.zeros(num_slots, np.int32)
        self._source_lengths = np.zeros(num_slots, np.int32)

    def keys_and_values(self, slot: int) -> list[Array]:
        """The slot's KV cache: key 0, value 0, key 1, … as (kv_heads, length, head_size)."""
        return self._read(self._tables[0, slot], self._lengths[slot])

    def source_keys_and_values(self, slot: int) -> list[Array]:
        """The KV cache of the slot's source, in the same order."""
        return self._read(self._tables[1, slot], self._source_lengths[slot])

    def length(self, slot: int) -> int:
        """How many tokens the slot holds."""
        return int(self._lengths[slot])

    def rewind(self, slot: int, length: int = 0) -> None:
        """Truncates the slot to `length` tokens."""
        self._lengths[slot] = length

    def encode(self, sources: Mapping[int, Sequence[int]]) -> None:
        """Writes sources to their slots' cache, all in one run."""
        assert self._encoder is not None, "a causal model has no encoder"
        slots, lengths = list(sources), [len(source) for source in sources.values()]
        inputs = {
            graph_contract.SOURCE_IDS: np.concatenate([np.array(ids) for ids in sources.values()]),
            graph_contract.POSITIONS: np.concatenate([np.arange(length) for length in lengths]),
            graph_contract.QUERY_STARTS: _starts(lengths),
            graph_contract.BLOCK_TABLE: self._tables[1, slots],
        }
        _run(self._encoder, self._encoding, inputs)
        self._source_lengths[slots] = lengths

    def prefill(self, slot: int, ids: Sequence[int], indices: Sequence[int] | None = None) -> Array:
        """Appends tokens to a slot. Returns logits at `indices` into ids (default: the last)."""
        return self.step([Chunk(slot, ids, [len(ids) - 1] if indices is None else indices)])

    def decode(self, ids: Sequence[int], first_slot: int = 0) -> Array:
        """Appends one token to each of several consecutive slots; returns (S, V)."""
        return self.step([Chunk(first_slot + i, [token], [0]) for i, token in enumerate(ids)])

    def step(self, chunks: Sequence[Chunk]) -> Array:
        """Appends tokens to any slots; returns the logits that are needed, in the same order. The
        same tokens' hidden states, if the graph has any, are in `hidden_LD`."""
        if not self._one_by_one or all(len(chunk.ids) == 1 for chunk in chunks):
            return self._run(chunks)
        found: dict[tuple[int, int], Array] = {}
        for at in range(max(len(chunk.ids) for chunk in chunks)):
            some = [
                Chunk(chunk.slot, chunk.ids[at : at + 1], [0] * (at in chunk.wanted))
                for chunk in chunks
                if at < len(chunk.ids)
            ]
            wanting = [(chunk.slot, at) for chunk in some if chunk.wanted]
            found |= zip(wanting, self._run(some), strict=True)
        wanted = [found[chunk.slot, at] for chunk in chunks for at in chunk.wanted]
        return np.array(wanted, np.float32).reshape(-1, self._sizes.vocab_size)

    def first_block(self, slot: int) -> int:
        return int(self._tables[0, slot, 0])

    def continue_blocks(self, chunks: Sequence[Chunk], pasts: Sequence[Array]) -> Array:
        """The logits of tokens after full blocks, any and any number of them. A slot has its new
        tokens only."""
        own = [-(-len(chunk.ids) // BLOCK) for chunk in chunks]
        widths = [len(past) + num for past, num in zip(pasts, own, strict=True)]
        table_SB = np.zeros((len(chunks), max(widths)), np.int32)
        for row, chunk, past, width in zip(table_SB, chunks, pasts, widths, strict=True):
            row[: len(past)] = past
            row[len(past) : width] = self._tables[0, chunk.slot, : width - len(past)]
            self._lengths[chunk.slot] = len(chunk.ids)
        lengths = np.array([len(past) * BLOCK for past in pasts], np.int32)
        return self._run_blocks(chunks, lengths, table_SB)

    def _run(self, chunks: Sequence[Chunk]) -> Array:
        slots = [chunk.slot for chunk in chunks]
        logits_LV = self._run_blocks(chunks, self._lengths[slots], self._tables[0, slots])
        self._lengths[slots] += np.array([len(chunk.ids) for chunk in chunks], np.int32)
        return logits_LV

    def _run_blocks(self, chunks: Sequence[Chunk], past: Array, table_SB: Array) -> Array:
        slots, lengths = [chunk.slot for chunk in chunks], [len(chunk.ids) for chunk in chunks]
        starts = _starts(lengths)
        wanted = [start + np.array(p.wanted) for start, p in zip(starts, chunks, strict=False)]
        inputs = {
            graph_contract.INPUT_IDS: np.concatenate([np.array(chunk.ids) for chunk in chunks]),
            graph_contract.POSITIONS: np.concatenate(
                [np.arange(first, first + num) for first, num in zip(past, lengths, strict=True)]
            ),
            graph_contract.QUERY_STARTS: starts,
            graph_contract.PAST_LENGTHS: past,
            graph_contract.BLOCK_TABLE: table_SB,
            graph_contract.LOGIT_INDICES: np.concatenate(wanted).astype(np.int64),
        }
        if self._encoder is not None:
            inputs[graph_contract.SOURCE_LENGTHS] = self._source_lengths[slots]
            inputs[graph_contract.SOURCE_TABLE] = self._tables[1, slots]
        num_logits = len(inputs[graph_contract.LOGIT_INDICES])
        logits_LV = np.empty((num_logits, self._sizes.vocab_size), np.float32)
        _bind(self._decoding.bind_output, graph_contract.LOGITS, logits_LV)
        if self._has_hidden:
            inputs[graph_contract.HIDDEN_INDICES] = inputs[graph_contract.LOGIT_INDICES]
            self.hidden_LD = np.empty((num_logits, self._sizes.d_model), np.float32)
            _bind(self._decoding.bind_output, graph_contract.HIDDEN, self.hidden_LD)
        _run(self._decoder, self._decoding, inputs)
        return logits_LV

    def _bound(self, session: onnxruntime.InferenceSession) -> Any:
        """The same memory is input and output: the operators extend it in place."""
        binding = session.io_binding()
        names = graph_contract.cache_names(self._sizes.num_layers)
        for name, cache in zip(names, self._caches, strict=True):
            _bind(binding.bind_input, name, cache)
            _bind(binding.bind_output, graph_contract.extended(name), cache)
        return binding

    def _read(self, blocks: Array, length: int) -> list[Array]:
        found = []
        for index, cache in enumerate(self._caches):
            some = cache[blocks]
            heads_BKPH = some if index % 2 else some.swapaxes(2, 3)
            heads_KBPH = heads_BKPH.swapaxes(0, 1)
            num_heads, _, _, size = heads_KBPH.shape
            found.append(heads_KBPH.reshape(num_heads, -1, size)[:, :length])
        return found


class EncoderOutput(NamedTuple):
    """What an encoder computes of one text."""

    hidden_TD: Array
    logits_LV: Array  # at the places that need logits


class EncoderRunner:
    """Runs an encoder: any number of texts in one run, packed."""

    def __init__(self, directory: Path, graphs: Graphs, sizes: Sizes) -> None:
        assert graphs.encoder is not None
        self._session = open_session(directory / graphs.encoder)
        self._has_segments = sizes.num_segments > 0

    def encode(
        self, texts: Sequence[Sequence[int]], places: Sequence[Sequence[int]] | None = None
    ) -> list[EncoderOutput]:
        """`places`: which tokens of each text need logits (default: none)."""
        places = [()] * len(texts) if places is None else places
        starts = _starts([len(ids) for ids in texts])
        offsets = zip(starts[:-1], places, strict=True)
        wanted = [start + np.array(each, np.int64) for start, each in offsets]
        inputs: dict[str, Array] = {
            graph_contract.INPUT_IDS: np.concatenate([np.array(ids, np.int64) for ids in texts]),
            graph_contract.POSITIONS: np.concatenate([np.arange(len(ids)) for ids in texts]),
            graph_contract.QUERY_STARTS: starts,
            graph_contract.LOGIT_INDICES: np.concatenate(wanted),
        }
        if self._has_segments:
            inputs[graph_contract.SEGMENTS] = np.zeros(starts[-1], np.int64)
        outputs = [graph_contract.HIDDEN, graph_contract.LOGITS]
        hidden_TD, logits_LV = self._session.run(outputs, inputs)
        ends = np.cumsum([len(each) for each in places])
        parts = zip(np.split(hidden_TD, starts[1:-1]), np.split(logits_LV, ends[:-1]), strict=True)
        return [EncoderOutput(*part) for part in parts]


def _pool(graphs: Graphs, sizes: Sizes, num_blocks: int) -> list[Array]:
    number = np.dtype(graphs.cache_type)
    return [
        _zeros((num_blocks, *shape), number)
        for layer in range(sizes.num_layers)
        for shape in graph_contract.block_shapes("cpu", *sizes.cached(layer))
    ]


def _zeros(shape: Sequence[int], number: np.dtype[Any]) -> Array:
    """In small pages. NumPy asks for huge ones: one block written to each slot of a large pool took
    2 MB there."""
    memory = mmap.mmap(-1, math.prod(shape) * number.itemsize, mmap.MAP_PRIVATE)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, number).reshape(shape)


def _starts(lengths: Sequence[int]) -> Array:
    return np.cumsum([0, *lengths], dtype=np.int32)


def _run(session: onnxruntime.InferenceSession, binding: Any, inputs: Mapping[str, Array]) -> None:
    for name, array in inputs.items():
        _bind(binding.bind_input, name, array)
    session.run_with_iobinding(binding)


def _bind(bind: Any, name: str, array: Array) -> None:
    assert array.flags.c_contiguous
    bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
