"""Runs the graphs over blocks.

Knows: ONNX Runtime, the graphs' contract. Does not know: requests, sampling, whose a block is.

The blocks are bound once, as what is and as what will be: graphs extend them in place. What a step
reads is a few small arrays of whole numbers, packed one sequence after another.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import onnxruntime

from quill.export.bundle import graph_contract
from quill.export.bundle.manifest import Sizes
from quill.server.engine.kv_cache import Blocks, DeviceBlocks, View, bind, view_of
from quill.server.engine.step import BlockCopy, Piece, Source
from quill.server.sampling.native import Hidden, Logits

# S sequences · T tokens of all of them · B blocks of the longest · L logits · V vocabulary


class Computed(NamedTuple):
    """What came of a step, piece by piece, for each token that it was wanted of."""

    logits_LV: Logits
    hidden_MD: Hidden


class Session(Protocol):
    """A model with a pool of numbered blocks."""

    def step(self, pieces: Sequence[Piece]) -> Computed:
        """Reads each piece into its blocks.

        What it gives is good until the next step; the caller may overwrite it.
        """

    def encode(self, sources: Sequence[Source]) -> None:
        """The encoder reads sources into their blocks."""

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks. No block is both read and written, and none is written twice."""


# S texts · T tokens of all of them · M wanted hidden states · D model size · L logits


Inputs = dict[str, npt.NDArray[Any]]


class BoundGraph:
    """A graph, with what it reads and writes.

    Binding an array takes longer than copying a step's few numbers to where those of the step
    before lie, if there are as many. A device copies inputs when they are bound and never looks at
    them again, so there (`rebinds`) each is bound for each step.
    """

    def __init__(self, session: Any, *, rebinds: bool = False) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._rebinds = rebinds
        self._inputs: Inputs = {}
        self._outputs: dict[str, View] = {}

    def bind_in_place(self, name: str, extended: str, view: View) -> None:
        """For good: memory that is read as one name and written as the other."""
        bind(self._binding.bind_input, name, view)
        bind(self._binding.bind_output, extended, view)

    def run(self, inputs: Inputs, outputs: Inputs) -> None:
        for name, array in inputs.items():
            held = self._inputs.get(name)
            if held is not None and held.shape == array.shape and not self._rebinds:
                held[...] = array
            else:
                bind(self._binding.bind_input, name, view_of(array))
                self._inputs[name] = array
        for name, array in outputs.items():
            view = view_of(array)
            if self._outputs.get(name) != view:
                bind(self._binding.bind_output, name, view)
                self._outputs[name] = view
        self._session.run_with_iobinding(self._binding)


def longs(numbers: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(numbers, np.int64)


def starts(lengths: Sequence[int]) -> list[int]:
    """Where each text begins, and where the last one ends."""
    return list(accumulate(lengths, initial=0))


def positions(starts: Sequence[int], lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    return longs(
        chain.from_iterable(
            range(start, start + length) for start, length in zip(starts, lengths, strict=True)
        )
    )


def indices(firsts: Sequence[int], wanted: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """Of all packed tokens those that are wanted of each text."""
    return longs(
        first + place for first, places in zip(firsts, wanted, strict=False) for place in places
    )


class OrtSession:
    """A decoder over blocks, and the encoder of a translator."""

    def __init__(
        self,
        decoder: onnxruntime.InferenceSession,
        blocks: Blocks | DeviceBlocks,
        sizes: Sizes,
        encoder: onnxruntime.InferenceSession | None = None,
        *,
        hidden: bool = False,
    ) -> None:
        self._blocks = blocks
        self._logits_LV = np.empty((1, sizes.vocab_size), np.float32)
        self._no_hidden_MD = np.empty((0, sizes.d_model), np.float32)
        self._gives_hidden = hidden
        self._decoder = self._bound(decoder, sizes.num_layers)
        self._encoder = None if encoder is None else self._bound(encoder, sizes.num_layers)

    def step(self, pieces: Sequence[Piece]) -> Computed:
        lengths = [len(piece.ids) for piece in pieces]
        firsts = starts(lengths)
        inputs: Inputs = {
            graph_contract.INPUT_IDS: longs(chain.from_iterable(piece.ids for piece in pieces)),
            graph_contract.POSITIONS: positions([piece.start for piece in pieces], lengths),
            graph_contract.QUERY_STARTS: np.array(firsts, np.int32),
            graph_contract.PAST_LENGTHS: np.array([piece.start for piece in pieces], np.int32),
            graph_contract.BLOCK_TABLE: _table([piece.blocks for piece in pieces]),
            graph_contract.LOGIT_INDICES: indices(firsts, [piece.wanted for piece in pieces]),
        }
        if self._encoder is not None:
            sources = [piece.source_length for piece in pieces]
            inputs[graph_contract.SOURCE_LENGTHS] = np.array(sources, np.int32)
            inputs[graph_contract.SOURCE_TABLE] = _table([each.source_blocks for each in pieces])
        logits_LV = self._room(len(inputs[graph_contract.LOGIT_INDICES]))
        outputs: Inputs = {graph_contract.LOGITS: logits_LV}
        hidden_MD = self._no_hidden_MD
        if self._gives_hidden:  # mostly of no token, which costs nothing
            wanted_M = indices(firsts, [piece.hidden for piece in pieces])
            inputs[graph_contract.HIDDEN_INDICES] = wanted_M
            if len(wanted_M):
                hidden_MD = np.empty((len(wanted_M), hidden_MD.shape[1]), np.float32)
            outputs[graph_contract.HIDDEN] = hidden_MD
        self._decoder.run(inputs, outputs)
        return Computed(logits_LV, hidden_MD)

    def encode(self, sources: Sequence[Source]) -> None:
        assert self._encoder is not None, "a causal model has no encoder"
        lengths = [len(source.ids) for source in sources]
        inputs: Inputs = {
            graph_contract.SOURCE_IDS: longs(chain.from_iterable(each.ids for each in sources)),
            graph_contract.POSITIONS: positions([0] * len(sources), lengths),
            graph_contract.QUERY_STARTS: np.array(starts(lengths), np.int32),
            graph_contract.BLOCK_TABLE: _table([source.blocks for source in sources]),
        }
        self._encoder.run(inputs, {})

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        self._blocks.copy(copies)

    def _bound(self, session: onnxruntime.InferenceSession, num_layers: int) -> BoundGraph:
        """With the blocks' memory on both sides."""
        graph = BoundGraph(session, rebinds=isinstance(self._blocks, DeviceBlocks))
        views = self._blocks.views()
        for name, view in zip(graph_contract.cache_names(num_layers), views, strict=True):
            graph.bind_in_place(name, graph_contract.extended(name), view)
        return graph

    def _room(self, num_logits: int) -> Logits:
        """The same memory from step to step: fresh pages would have to be cleared."""
        if len(self._logits_LV) < num_logits:
            size = max(num_logits, 2 * len(self._logits_LV))
            self._logits_LV = np.empty((size, self._logits_LV.shape[1]), np.float32)
        return self._logits_LV[:num_logits]


def _table(blocks: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
    table_SB = np.zeros((len(blocks), max(map(len, blocks))), np.int32)
    for row, numbers in enumerate(blocks):
        table_SB[row, : len(numbers)] = numbers
    return table_SB


class EncoderSession:
    """A model that reads texts and keeps nothing."""

    def __init__(self, encoder: onnxruntime.InferenceSession, sizes: Sizes) -> None:
        self._encoder = BoundGraph(encoder)
        self._sizes = sizes

    def step(self, pieces: Sequence[Piece]) -> Computed:
        lengths = [len(piece.ids) for piece in pieces]
        firsts = starts(lengths)
        logits_L = indices(firsts, [piece.wanted for piece in pieces])
        hidden_M = indices(firsts, [piece.hidden for piece in pieces])
        inputs: Inputs = {
            graph_contract.INPUT_IDS: longs(chain.from_iterable(piece.ids for piece in pieces)),
            graph_contract.POSITIONS: positions([0] * len(pieces), lengths),
            graph_contract.QUERY_STARTS: np.array(firsts, np.int32),
            graph_contract.LOGIT_INDICES: logits_L,
        }
        if self._sizes.num_segments:
            inputs[graph_contract.SEGMENTS] = np.zeros(firsts[-1], np.int64)
        logits_LV = np.empty((len(logits_L), self._sizes.vocab_size), np.float32)
        hidden_TD = np.empty((firsts[-1], self._sizes.d_model), np.float32)
        outputs: Inputs = {graph_contract.LOGITS: logits_LV, graph_contract.HIDDEN: hidden_TD}
        self._encoder.run(inputs, outputs)
        return Computed(logits_LV, hidden_TD[hidden_M])

    def encode(self, sources: Sequence[Source]) -> None:
        raise AssertionError("only translators have sources")

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        raise AssertionError("an encoder keeps nothing that could be copied")
