"""Runs the graphs over blocks.

Knows: ONNX Runtime, the graphs' contract. Does not know: requests, sampling, whose a block is.

The blocks are bound once, as what is and as what will be: graphs extend them in place. What a step
reads is a few small arrays of whole numbers, packed one sequence after another.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import onnxruntime

from quill.export.bundle import graph_contract
from quill.export.bundle.manifest import Sizes
from quill.server.runtime.blocks import Blocks, DeviceBlocks
from quill.server.runtime.packed import BoundGraph, Inputs, indices, longs, positions, starts
from quill.server.sampling.arrays import Logits
from quill.server.scheduler.plan import BlockCopy, Piece, Source
from quill.server.scheduler.session import Computed

# S sequences · T tokens of all of them · B blocks of the longest · L logits · V vocabulary


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
