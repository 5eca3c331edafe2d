"""Runs a bundle's graphs the plain way: slots, each with blocks of its own.

Knows: the graphs' contract, IOBinding with caches updated in place.
Does not know: PyTorch, requests, sampling. Verification and measurements use it; the server has
an engine of its own.
"""

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


class Piece(NamedTuple):
    """What a step does for one slot: more tokens, and which of them want logits."""

    slot: int
    ids: Sequence[int]
    wanted: Sequence[int]


class Runner:
    """Slots and the graphs that fill them. A slot's blocks are neighbours in the pool."""

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
        assert graphs.decoder is not None, "an encoder has a runner of its own"
        self._decoder = open_session(directory / graphs.decoder)
        self._decoding = self._bound(self._decoder)
        self._encoder, self._encoding = None, None
        if graphs.encoder is not None:
            self._encoder = open_session(directory / graphs.encoder)
            self._encoding = self._bound(self._encoder)
        self._shows_hidden = graphs.hidden
        self.hidden_LD: Array = np.empty((0, sizes.d_model), np.float32)
        self._lengths = np.zeros(num_slots, np.int32)
        self._source_lengths = np.zeros(num_slots, np.int32)

    def keys_and_values(self, slot: int) -> list[Array]:
        """What the slot holds: key 0, value 0, key 1, … as (kv_heads, length, head_size)."""
        return self._read(self._tables[0, slot], self._lengths[slot])

    def parked(self, slot: int) -> list[Array]:
        """The slot's source, as keys and values in the same order."""
        return self._read(self._tables[1, slot], self._source_lengths[slot])

    def length(self, slot: int) -> int:
        """How many tokens the slot holds."""
        return int(self._lengths[slot])

    def rewind(self, slot: int, length: int = 0) -> None:
        """Forgets what the slot holds beyond `length` tokens."""
        self._lengths[slot] = length

    def encode(self, sources: Mapping[int, Sequence[int]]) -> None:
        """Parks sources in their slots, all in one run."""
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
        """Appends tokens to a slot. Answers logits at `indices` into ids (default: the last)."""
        return self.step([Piece(slot, ids, [len(ids) - 1] if indices is None else indices)])

    def decode(self, ids: Sequence[int], first_slot: int = 0) -> Array:
        """Appends one token to each of several neighbouring slots; answers (S, V)."""
        return self.step([Piece(first_slot + i, [token], [0]) for i, token in enumerate(ids)])

    def step(self, pieces: Sequence[Piece]) -> Array:
        """Appends tokens to any slots; answers the logits that are wanted, in the same order. If
        the graph shows hidden states, those of the same tokens are in `hidden_LD` until the next.
        """
        if not self._one_by_one or all(len(piece.ids) == 1 for piece in pieces):
            return self._run(pieces)
        found: dict[tuple[int, int], Array] = {}
        for at in range(max(len(piece.ids) for piece in pieces)):
            some = [
                Piece(piece.slot, piece.ids[at : at + 1], [0] * (at in piece.wanted))
                for piece in pieces
                if at < len(piece.ids)
            ]
            wanting = [(piece.slot, at) for piece in some if piece.wanted]
            found |= zip(wanting, self._run(some), strict=True)
        wanted = [found[piece.slot, at] for piece in pieces for at in piece.wanted]
        return np.array(wanted, np.float32).reshape(-1, self._sizes.vocab_size)

    def _run(self, pieces: Sequence[Piece]) -> Array:
        slots, lengths = [piece.slot for piece in pieces], [len(piece.ids) for piece in pieces]
        starts, past = _starts(lengths), self._lengths[slots]
        wanted = [start + np.array(p.wanted) for start, p in zip(starts, pieces, strict=False)]
        inputs = {
            graph_contract.INPUT_IDS: np.concatenate([np.array(piece.ids) for piece in pieces]),
            graph_contract.POSITIONS: np.concatenate(
                [np.arange(first, first + num) for first, num in zip(past, lengths, strict=True)]
            ),
            graph_contract.QUERY_STARTS: starts,
            graph_contract.PAST_LENGTHS: past,
            graph_contract.BLOCK_TABLE: self._tables[0, slots],
            graph_contract.LOGIT_INDICES: np.concatenate(wanted).astype(np.int64),
        }
        if self._encoder is not None:
            inputs[graph_contract.SOURCE_LENGTHS] = self._source_lengths[slots]
            inputs[graph_contract.SOURCE_TABLE] = self._tables[1, slots]
        num_logits = len(inputs[graph_contract.LOGIT_INDICES])
        logits_LV = np.empty((num_logits, self._sizes.vocab_size), np.float32)
        _bind(self._decoding.bind_output, graph_contract.LOGITS, logits_LV)
        if self._shows_hidden:
            inputs[graph_contract.HIDDEN_INDICES] = inputs[graph_contract.LOGIT_INDICES]
            self.hidden_LD = np.empty((num_logits, self._sizes.d_model), np.float32)
            _bind(self._decoding.bind_output, graph_contract.HIDDEN, self.hidden_LD)
        _run(self._decoder, self._decoding, inputs)
        self._lengths[slots] += np.array(lengths, np.int32)
        return logits_LV

    def _bound(self, session: onnxruntime.InferenceSession) -> Any:
        """The same memory as what was and what is new: the operators extend it in place."""
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


def _pool(graphs: Graphs, sizes: Sizes, num_blocks: int) -> list[Array]:
    shapes = graph_contract.block_shapes(
        "cpu", sizes.num_kv_heads, sizes.head_size, sizes.value_size
    )
    number = np.dtype(graphs.cache_type)
    return [
        np.zeros((num_blocks, *shape), number) for _ in range(sizes.num_layers) for shape in shapes
    ]


def _starts(lengths: Sequence[int]) -> Array:
    return np.cumsum([0, *lengths], dtype=np.int32)


def _run(session: onnxruntime.InferenceSession, binding: Any, inputs: Mapping[str, Array]) -> None:
    for name, array in inputs.items():
        _bind(binding.bind_input, name, array)
    session.run_with_iobinding(binding)


def _bind(bind: Any, name: str, array: Array) -> None:
    assert array.flags.c_contiguous
    bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
