"""Runs an encoder's graph over whole texts.

Knows: ONNX Runtime, the graphs' contract. Does not know: requests, what becomes of hidden states.
Nothing is kept from step to step, so there are no blocks.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import onnxruntime

from quill.export.bundle import graph_contract
from quill.export.bundle.manifest import Sizes
from quill.server.runtime.packed import BoundGraph, Inputs, indices, longs, positions, starts
from quill.server.scheduler.plan import BlockCopy, Piece, Source
from quill.server.scheduler.session import Computed

# S texts · T tokens of all of them · M wanted hidden states · D model size · L logits


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
