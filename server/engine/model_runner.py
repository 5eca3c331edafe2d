"""The model as the engine sees it (Session), and its implementations on ONNX Runtime.

Knows: ONNX Runtime, the graphs' contract. Does not know: requests, sampling, whose a block is.

What a step reads is a few small arrays of whole numbers, packed one sequence after another. The KV
cache's blocks are bound once, as input and as output: graphs extend them in place.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import onnxruntime

from quill.export.bundle import graph_contract
from quill.export.bundle.manifest import Sizes
from quill.server.engine.kv_cache import DeviceKVCache, KVCache, View, view_of
from quill.server.sampling.native import Hidden, Logits

# S sequences · T tokens of all of them · B blocks of the longest · L logits · V vocabulary
# M hidden states · D model size


class Chunk(NamedTuple):
    """Tokens of one sequence that a step computes."""

    ids: Sequence[int]
    start: int  # tokens that are in the blocks before
    blocks: Sequence[int]
    logits_at: Sequence[int]  # after which of the ids logits are needed, ascending
    source_blocks: Sequence[int] = ()
    source_length: int = 0
    hidden_at: Sequence[int] = ()  # after which of the ids hidden states are needed, ascending


class Source(NamedTuple):
    """What the encoder reads, from its first token to its last."""

    ids: Sequence[int]
    blocks: Sequence[int]


class BlockCopy(NamedTuple):
    source: int
    target: int


class ModelOutput(NamedTuple):
    """Of all chunks, one after another, for each token of which it was needed."""

    logits_LV: Logits
    hidden_MD: Hidden


NOTHING_COMPUTED = ModelOutput(np.empty((0, 0), np.float32), np.empty((0, 0), np.float32))


class Session(Protocol):
    """A model with a pool of numbered blocks."""

    def step(self, chunks: Sequence[Chunk]) -> ModelOutput:
        """Computes each chunk, and writes its keys and values into its blocks.

        The output is valid until the next step; the caller may overwrite it.
        """

    def encode(self, sources: Sequence[Source]) -> None:
        """The encoder writes its keys and values of sources into their blocks."""

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks. No block is both read and written, and none is written twice."""


Inputs = dict[str, npt.NDArray[Any]]


class BoundGraph:
    """A graph with its inputs and outputs bound.

    Binding an array takes longer than copying a step's few numbers into the array of the step
    before, if the shapes are equal. A device copies inputs when they are bound and never again, so
    there (`rebinds`) each input is bound for each step.
    """

    def __init__(self, session: Any, *, rebinds: bool = False) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._rebinds = rebinds
        self._inputs: Inputs = {}
        self._outputs: dict[str, View] = {}

    def bind_in_place(self, name: str, extended: str, view: View) -> None:
        """Once: memory that is read by one name and written by the other."""
        self._binding.bind_input(name, *view)
        self._binding.bind_output(extended, *view)

    def run(self, inputs: Inputs, outputs: Inputs) -> None:
        for name, array in inputs.items():
            bound = self._inputs.get(name)
            if bound is not None and bound.shape == array.shape and not self._rebinds:
                bound[...] = array
            else:
                self._binding.bind_input(name, *view_of(array))
                self._inputs[name] = array
        for name, array in outputs.items():
            view = view_of(array)
            if self._outputs.get(name) != view:
                self._binding.bind_output(name, *view)
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


def indices(firsts: Sequence[int], places: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """Some places of each text, among all packed tokens."""
    return longs(
        first + place for first, some in zip(firsts, places, strict=False) for place in some
    )


class OrtSession:
    """A decoder over the KV cache, and the encoder of a seq2seq model."""

    def __init__(
        self,
        decoder: onnxruntime.InferenceSession,
        kv_cache: KVCache | DeviceKVCache,
        sizes: Sizes,
        encoder: onnxruntime.InferenceSession | None = None,
        *,
        gives_hidden: bool = False,
    ) -> None:
        self.kv_cache = kv_cache
        self._logits_LV = np.empty((1, sizes.vocab_size), np.float32)
        self._no_hidden_MD = np.empty((0, sizes.d_model), np.float32)
        self._gives_hidden = gives_hidden
        self._decoder = self._bound(decoder, sizes.num_layers)
        self._encoder = None if encoder is None else self._bound(encoder, sizes.num_layers)

    def step(self, chunks: Sequence[Chunk]) -> ModelOutput:
        lengths = [len(chunk.ids) for chunk in chunks]
        firsts = starts(lengths)
        inputs: Inputs = {
            graph_contract.INPUT_IDS: longs(chain.from_iterable(chunk.ids for chunk in chunks)),
            graph_contract.POSITIONS: positions([chunk.start for chunk in chunks], lengths),
            graph_contract.QUERY_STARTS: np.array(firsts, np.int32),
            graph_contract.PAST_LENGTHS: np.array([chunk.start for chunk in chunks], np.int32),
            graph_contract.BLOCK_TABLE: _table([chunk.blocks for chunk in chunks]),
            graph_contract.LOGIT_INDICES: indices(firsts, [chunk.logits_at for chunk in chunks]),
        }
        if self._encoder is not None:
            sources = [chunk.source_length for chunk in chunks]
            inputs[graph_contract.SOURCE_LENGTHS] = np.array(sources, np.int32)
            inputs[graph_contract.SOURCE_TABLE] = _table([chunk.source_blocks for chunk in chunks])
        logits_LV = self._logits_array(len(inputs[graph_contract.LOGIT_INDICES]))
        outputs: Inputs = {graph_contract.LOGITS: logits_LV}
        hidden_MD = self._no_hidden_MD
        if self._gives_hidden:  # of no token, mostly: that costs nothing
            hidden_at_M = indices(firsts, [chunk.hidden_at for chunk in chunks])
            inputs[graph_contract.HIDDEN_INDICES] = hidden_at_M
            if len(hidden_at_M):
                hidden_MD = np.empty((len(hidden_at_M), hidden_MD.shape[1]), np.float32)
            outputs[graph_contract.HIDDEN] = hidden_MD
        self._decoder.run(inputs, outputs)
        return ModelOutput(logits_LV, hidden_MD)

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
        self.kv_cache.copy(copies)

    def _bound(self, session: onnxruntime.InferenceSession, num_layers: int) -> BoundGraph:
        """With the KV cache as input and as output."""
        graph = BoundGraph(session, rebinds=isinstance(self.kv_cache, DeviceKVCache))
        views = self.kv_cache.views()
        for name, view in zip(graph_contract.cache_names(num_layers), views, strict=True):
            graph.bind_in_place(name, graph_contract.extended(name), view)
        return graph

    def _logits_array(self, num_logits: int) -> Logits:
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
    """An encoder over whole texts. It has no KV cache: nothing is kept from step to step."""

    def __init__(self, encoder: onnxruntime.InferenceSession, sizes: Sizes) -> None:
        self._encoder = BoundGraph(encoder)
        self._sizes = sizes

    def step(self, chunks: Sequence[Chunk]) -> ModelOutput:
        lengths = [len(chunk.ids) for chunk in chunks]
        firsts = starts(lengths)
        logits_at_L = indices(firsts, [chunk.logits_at for chunk in chunks])
        hidden_at_M = indices(firsts, [chunk.hidden_at for chunk in chunks])
        inputs: Inputs = {
            graph_contract.INPUT_IDS: longs(chain.from_iterable(chunk.ids for chunk in chunks)),
            graph_contract.POSITIONS: positions([0] * len(chunks), lengths),
            graph_contract.QUERY_STARTS: np.array(firsts, np.int32),
            graph_contract.LOGIT_INDICES: logits_at_L,
        }
        if self._sizes.num_segments:
            inputs[graph_contract.SEGMENTS] = np.zeros(firsts[-1], np.int64)
        num_logits = self._sizes.num_classes or self._sizes.vocab_size
        logits_LV = np.empty((len(logits_at_L), num_logits), np.float32)
        hidden_TD = np.empty((firsts[-1], self._sizes.d_model), np.float32)
        outputs: Inputs = {graph_contract.LOGITS: logits_LV, graph_contract.HIDDEN: hidden_TD}
        self._encoder.run(inputs, outputs)
        return ModelOutput(logits_LV, hidden_TD[hidden_at_M])

    def encode(self, sources: Sequence[Source]) -> None:
        raise AssertionError("only seq2seq models have sources")

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        raise AssertionError("an encoder keeps nothing that could be copied")
