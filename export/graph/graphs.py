"""The network as the graphs that a server runs: a decoder, and for seq2seq an encoder.

Knows: the graphs' inputs and outputs (export/bundle/graph_contract.py), which dimensions are free.
Does not know: how attention is emitted, files, what the weights are made of.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from quill.export.bundle import graph_contract
from quill.export.graph.attention import (
    Layer,
    Packed,
    PackedAttending,
    PackedEncoding,
    PagedAttending,
    Pool,
    Source,
    store,
)
from quill.export.precisions import Device
from quill.model.network.transformer import Transformer

# S sequences · T new tokens of all · B blocks of the longest · L logits · D model size
# V vocabulary

Project = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Graph:
    """A module to trace, with all that the tracer must be told about it."""

    module: nn.Module
    arguments: tuple[Any, ...]
    dynamic_shapes: tuple[Any, ...]
    input_names: list[str]
    output_names: list[str]


class DecoderModule(nn.Module):
    """One step: new tokens in, logits and extended blocks out."""

    def __init__(self, model: Transformer, project: Project, device: Device) -> None:
        super().__init__()
        self.model = model
        self.project = project
        self.attending = PackedAttending if device == "cpu" else PagedAttending

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        starts_S: Tensor,
        past_S: Tensor,
        table_SB: Tensor,
        logit_indices_L: Tensor,
        caches: list[Tensor],
        source_lengths_S: Tensor | None = None,
        source_table_SB: Tensor | None = None,
    ) -> list[Tensor]:
        source = None
        if source_lengths_S is not None and source_table_SB is not None:
            source = Source(source_lengths_S, source_table_SB)
        model, pool = self.model, _pool(caches)
        packed = Packed(positions_T, starts_S)
        x_TD = model.hidden(
            ids_T,
            self.attending(model.config, model.rotary, packed, past_S, table_SB, pool, source),
        )
        # Before the projection: logits nobody asked for are the largest waste there is.
        x_LD = F.embedding(logit_indices_L, x_TD)
        return [self.project(x_LD).to(torch.float32), *pool.flat()]


class EncoderModule(nn.Module):
    """Sources in; each decoder layer's keys and values of them go into blocks."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        source_ids_T: Tensor,
        positions_T: Tensor,
        starts_S: Tensor,
        table_SB: Tensor,
        caches: list[Tensor],
    ) -> list[Tensor]:
        model, pool = self.model, _pool(caches)
        attending = PackedEncoding(model.config, model.rotary, Packed(positions_T, starts_S))
        memory_TD = model.memory(source_ids_T, attending)
        for layer, cross in enumerate(model.crossings()):
            store(model.config, pool, layer, cross.key_value(memory_TD), (starts_S, table_SB))
        return pool.flat()


# Which dimensions of an input are free. What isn't here are caches, whose number of blocks is.
_FREE: Mapping[str, tuple[str, ...]] = {
    graph_contract.INPUT_IDS: ("tokens",),
    graph_contract.SOURCE_IDS: ("tokens",),
    graph_contract.POSITIONS: ("tokens",),
    graph_contract.QUERY_STARTS: ("starts",),
    graph_contract.PAST_LENGTHS: ("sequences",),
    graph_contract.BLOCK_TABLE: ("sequences", "most_blocks"),
    graph_contract.LOGIT_INDICES: ("num_logits",),
    graph_contract.SOURCE_LENGTHS: ("sequences",),
    graph_contract.SOURCE_TABLE: ("sequences", "most_source_blocks"),
}
# Arbitrary; that they differ shows what is free.
_SIZES = {
    "sequences": 2,
    "starts": 3,
    "num_logits": 4,
    "tokens": 5,
    "most_blocks": 6,
    "most_source_blocks": 7,
}
_NUM_BLOCKS = 9
_LONG = (
    graph_contract.INPUT_IDS,
    graph_contract.SOURCE_IDS,
    graph_contract.POSITIONS,
    graph_contract.LOGIT_INDICES,
)
_DECODER_INPUTS = (
    graph_contract.INPUT_IDS,
    graph_contract.POSITIONS,
    graph_contract.QUERY_STARTS,
    graph_contract.PAST_LENGTHS,
    graph_contract.BLOCK_TABLE,
    graph_contract.LOGIT_INDICES,
)
_ENCODER_INPUTS = (
    graph_contract.SOURCE_IDS,
    graph_contract.POSITIONS,
    graph_contract.QUERY_STARTS,
    graph_contract.BLOCK_TABLE,
)
_SOURCE_INPUTS = (graph_contract.SOURCE_LENGTHS, graph_contract.SOURCE_TABLE)


def decoder_graph(
    model: Transformer, project: Project, cache_type: torch.dtype, device: Device
) -> Graph:
    """The decoder of either family. `project` turns hidden states into logits."""
    module = DecoderModule(model, project, device).eval()
    after = _SOURCE_INPUTS if model.config.family == "seq2seq" else ()
    caches = _caches(model, cache_type, device)
    return _graph(module, _DECODER_INPUTS, caches, after, [graph_contract.LOGITS])


def encoder_graph(model: Transformer, cache_type: torch.dtype) -> Graph:
    """The encoder of a seq2seq model."""
    caches = _caches(model, cache_type, "cpu")
    return _graph(EncoderModule(model).eval(), _ENCODER_INPUTS, caches)


def _graph(
    module: nn.Module,
    before: Sequence[str],
    caches: list[Tensor],
    after: Sequence[str] = (),
    outputs: Sequence[str] = (),
) -> Graph:
    """With the caches among its inputs, and as its last outputs."""
    names = graph_contract.cache_names(len(caches) // 2)
    free_caches = [{0: Dim("num_blocks")} for _ in caches]
    return Graph(
        module=module,
        arguments=(*map(_example, before), caches, *map(_example, after)),
        dynamic_shapes=(*map(_free, before), free_caches, *map(_free, after)),
        input_names=[*before, *names, *after],
        output_names=[*outputs, *map(graph_contract.extended, names)],
    )


def _free(name: str) -> dict[int, Any]:
    return {axis: Dim(dimension) for axis, dimension in enumerate(_FREE[name])}


def _example(name: str) -> Tensor:
    shape = [_SIZES[dimension] for dimension in _FREE[name]]
    return torch.zeros(shape, dtype=torch.int64 if name in _LONG else torch.int32)


def _caches(model: Transformer, cache_type: torch.dtype, device: Device) -> list[Tensor]:
    config = model.config
    shapes = graph_contract.block_shapes(device, *config.cached)
    return [
        torch.zeros((_NUM_BLOCKS, *shape), dtype=cache_type)
        for _ in range(config.num_layers)
        for shape in shapes
    ]


def _pool(sides: Sequence[Tensor]) -> Pool:
    return Pool([Layer(*sides[i : i + 2]) for i in range(0, len(sides), 2)])
