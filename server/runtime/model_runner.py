"""Runs the graphs over blocks.

Knows: ONNX Runtime, the graphs' contract. Does not know: requests, sampling, whose a block is.

The blocks are bound once, as what is and as what will be: graphs extend them in place. What a step
reads is a few small arrays of whole numbers, packed one sequence after another.
"""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from quill.export.bundle import graph_contract
from quill.export.bundle.manifest import Sizes
from quill.server.runtime.blocks import Blocks, DeviceBlocks, bind, view_of
from quill.server.sampling.arrays import Logits
from quill.server.scheduler.plan import BlockCopy, Piece, Source
from quill.server.scheduler.session import Computed

# S sequences · T tokens of all of them · B blocks of the longest · L logits · V vocabulary


_Inputs = dict[str, npt.NDArray[Any]]


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
        self._decoder = decoder
        self._encoder = encoder
        self._blocks = blocks
        self._logits_LV = np.empty((1, sizes.vocab_size), np.float32)
        self._decoding = self._bound(decoder, sizes.num_layers)
        # Of no token, which costs nothing: bound once, for the graph wants it bound.
        self._no_tokens, self._no_hidden_MD = _longs(()), np.empty((0, sizes.d_model), np.float32)
        if hidden:
            bind(self._decoding.bind_input, graph_contract.HIDDEN_INDICES, view_of(self._no_tokens))
            bind(self._decoding.bind_output, graph_contract.HIDDEN, view_of(self._no_hidden_MD))
        self._encoding = None if encoder is None else self._bound(encoder, sizes.num_layers)

    def step(self, pieces: Sequence[Piece]) -> Computed:
        lengths = [len(piece.ids) for piece in pieces]
        starts = _starts(lengths)
        inputs: _Inputs = {
            graph_contract.INPUT_IDS: _longs(chain.from_iterable(piece.ids for piece in pieces)),
            graph_contract.POSITIONS: _positions([piece.start for piece in pieces], lengths),
            graph_contract.QUERY_STARTS: np.array(starts, np.int32),
            graph_contract.PAST_LENGTHS: np.array([piece.start for piece in pieces], np.int32),
            graph_contract.BLOCK_TABLE: _table([piece.blocks for piece in pieces]),
            graph_contract.LOGIT_INDICES: _longs(
                start + index
                for start, piece in zip(starts, pieces, strict=False)
                for index in piece.wanted
            ),
        }
        if self._encoder is not None:
            sources = [piece.source_length for piece in pieces]
            inputs[graph_contract.SOURCE_LENGTHS] = np.array(sources, np.int32)
            inputs[graph_contract.SOURCE_TABLE] = _table([each.source_blocks for each in pieces])
        logits_LV = self._room(len(inputs[graph_contract.LOGIT_INDICES]))
        bind(self._decoding.bind_output, graph_contract.LOGITS, view_of(logits_LV))
        _run(self._decoder, self._decoding, inputs)
        return Computed(logits_LV, np.empty((0, 1), np.float32))

    def encode(self, sources: Sequence[Source]) -> None:
        assert self._encoder is not None, "a causal model has no encoder"
        lengths = [len(source.ids) for source in sources]
        inputs: _Inputs = {
            graph_contract.SOURCE_IDS: _longs(chain.from_iterable(each.ids for each in sources)),
            graph_contract.POSITIONS: _positions([0] * len(sources), lengths),
            graph_contract.QUERY_STARTS: np.array(_starts(lengths), np.int32),
            graph_contract.BLOCK_TABLE: _table([source.blocks for source in sources]),
        }
        _run(self._encoder, self._encoding, inputs)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        self._blocks.copy(copies)

    def _bound(self, session: onnxruntime.InferenceSession, num_layers: int) -> Any:
        """With the blocks' memory on both sides."""
        binding = session.io_binding()
        views = self._blocks.views()
        for name, view in zip(graph_contract.cache_names(num_layers), views, strict=True):
            bind(binding.bind_input, name, view)
            bind(binding.bind_output, graph_contract.extended(name), view)
        return binding

    def _room(self, num_logits: int) -> Logits:
        """The same memory from step to step: fresh pages would have to be cleared."""
        if len(self._logits_LV) < num_logits:
            size = max(num_logits, 2 * len(self._logits_LV))
            self._logits_LV = np.empty((size, self._logits_LV.shape[1]), np.float32)
        return self._logits_LV[:num_logits]


def _run(session: Any, binding: Any, inputs: _Inputs) -> None:
    for name, array in inputs.items():
        bind(binding.bind_input, name, view_of(array))
    session.run_with_iobinding(binding)


def _longs(numbers: Any) -> npt.NDArray[np.int64]:
    return np.fromiter(numbers, np.int64)


def _starts(lengths: Sequence[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))


def _positions(starts: Sequence[int], lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    return _longs(
        chain.from_iterable(
            range(start, start + length) for start, length in zip(starts, lengths, strict=True)
        )
    )


def _table(blocks: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
    table_SB = np.zeros((len(blocks), max(map(len, blocks))), np.int32)
    for row, numbers in enumerate(blocks):
        table_SB[row, : len(numbers)] = numbers
    return table_SB
