"""The network as the graphs that a server runs: a decoder, an encoder, or for seq2seq both.

Knows: the graphs' inputs and outputs (export/bundle/graph_contract.py), dynamic dimensions.
Does not know: attention's operators, files, quantization.
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
    PackedAttention,
    PackedEncoderAttention,
    PagedAttention,
    Pool,
    Source,
    store,
)
from quill.export.graph.recurrent import PackedStateAccess, write_source_states
from quill.export.precisions import Device
from quill.model.network.config import ModelConfig
from quill.model.network.network import Network
from quill.model.network.recurrent import Recurrent
from quill.model.network.transformer import Transformer

# S sequences · T new tokens of all · B blocks of the longest · L logits · M hidden states
# D model size · V vocabulary

Project = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Graph:
    """A module to trace, with the tracer's arguments."""

    module: nn.Module
    arguments: tuple[Any, ...]
    dynamic_shapes: tuple[Any, ...]
    input_names: list[str]
    output_names: list[str]


class DecoderModule(nn.Module):
    """One step: new tokens in, logits and extended blocks out."""

    def __init__(self, model: Network, project: Project, device: Device) -> None:
        super().__init__()
        self.model = model
        self.project = project
        self.paging = PackedAttention if device == "cpu" else PagedAttention

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
        pool, packed = _pool(caches), Packed(positions_T, starts_S)
        x_TD = self.hidden(ids_T, packed, past_S, table_SB, pool, source)
        return [self.logits(x_TD, logit_indices_L), *pool.flat()]

    def hidden(
        self,
        ids_T: Tensor,
        packed: Packed,
        past_S: Tensor,
        table_SB: Tensor,
        pool: Pool,
        source: Source | None = None,
    ) -> Tensor:
        model = self.model
        if isinstance(model, Transformer):
            attn_impl = self.paging(
                *(model.config, model.rotary, packed, past_S, table_SB, pool, source),
                model.relative("decoder"),
            )
            return model.hidden(ids_T, attn_impl)
        assert source is not None, "a recurrent decoder needs a source"
        state_access = PackedStateAccess(model.config, packed, past_S, table_SB, pool, source)
        return model.hidden(ids_T, state_access)

    def logits(self, x_TD: Tensor, indices_L: Tensor) -> Tensor:
        # Selected before the projection: most tokens of a prompt need no logits.
        return self.project(F.embedding(indices_L, x_TD)).to(torch.float32)


class HiddenStatesModule(DecoderModule):
    """A causal model's step with hidden states as output. `norm`: the final norm, if the projection
    computes it for its inputs only."""

    def __init__(
        self, model: Transformer, project: Project, device: Device, norm: nn.Module
    ) -> None:
        super().__init__(model, project, device)
        self.norm = norm

    def forward(  # type: ignore[override]  # a causal model has no source
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        starts_S: Tensor,
        past_S: Tensor,
        table_SB: Tensor,
        logit_indices_L: Tensor,
        caches: list[Tensor],
        hidden_indices_M: Tensor,
    ) -> list[Tensor]:
        pool, packed = _pool(caches), Packed(positions_T, starts_S)
        x_TD = self.hidden(ids_T, packed, past_S, table_SB, pool)
        hidden_MD: Tensor = self.norm(F.embedding(hidden_indices_M, x_TD))
        return [self.logits(x_TD, logit_indices_L), hidden_MD.to(torch.float32), *pool.flat()]


class EncoderModule(nn.Module):
    """Encodes sources and writes each decoder layer's keys and values to blocks."""

    def __init__(self, model: Network) -> None:
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
        if isinstance(model, Recurrent):
            write_source_states(model, source_ids_T, pool, (starts_S, table_SB))
            return pool.flat()
        assert isinstance(model, Transformer)
        packed, bias_NR = Packed(positions_T, starts_S), model.relative("encoder")
        attn_impl = PackedEncoderAttention(model.config, model.rotary, packed, bias_NR)
        memory_TD = model.memory(source_ids_T, attn_impl)
        for layer, cross in enumerate(model.cross_attentions()):
            key_value = cross.key_value(memory_TD).chunk(2, dim=-1)
            store(model.config, pool, layer, key_value, (starts_S, table_SB))
        return pool.flat()


class TextEncoderModule(nn.Module):
    """An encoder model: texts in, every token's hidden state and some tokens' logits out."""

    def __init__(self, model: Network, project: Project) -> None:
        super().__init__()
        assert isinstance(model, Transformer)
        self.model = model
        self.project = project

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        starts_S: Tensor,
        logit_indices_L: Tensor,
        segments_T: Tensor | None = None,
    ) -> list[Tensor]:
        model = self.model
        packed, bias_NR = Packed(positions_T, starts_S), model.relative("encoder")
        attn_impl = PackedEncoderAttention(model.config, model.rotary, packed, bias_NR)
        hidden_TD = model.memory(ids_T, attn_impl, segments_T)
        return [hidden_TD, self.project(F.embedding(logit_indices_L, hidden_TD))]


# The dynamic dimensions of each input but caches, whose number of blocks is dynamic.
_FREE: Mapping[str, tuple[str, ...]] = {
    graph_contract.INPUT_IDS: ("tokens",),
    graph_contract.SOURCE_IDS: ("tokens",),
    graph_contract.POSITIONS: ("tokens",),
    graph_contract.QUERY_STARTS: ("starts",),
    graph_contract.PAST_LENGTHS: ("sequences",),
    graph_contract.BLOCK_TABLE: ("sequences", "most_blocks"),
    graph_contract.LOGIT_INDICES: ("num_logits",),
    graph_contract.HIDDEN_INDICES: ("num_hidden",),
    graph_contract.SEGMENTS: ("tokens",),
    graph_contract.SOURCE_LENGTHS: ("sequences",),
    graph_contract.SOURCE_TABLE: ("sequences", "most_source_blocks"),
}
# Arbitrary, and different, so that the tracer tells dynamic dimensions apart.
_SIZES = {
    "sequences": 2,
    "starts": 3,
    "num_logits": 4,
    "tokens": 5,
    "most_blocks": 6,
    "most_source_blocks": 7,
    "num_hidden": 8,
}
_NUM_BLOCKS = 9
_LONG = (
    graph_contract.INPUT_IDS,
    graph_contract.SOURCE_IDS,
    graph_contract.POSITIONS,
    graph_contract.LOGIT_INDICES,
    graph_contract.HIDDEN_INDICES,
    graph_contract.SEGMENTS,
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
_TEXT_ENCODER_INPUTS = (
    graph_contract.INPUT_IDS,
    graph_contract.POSITIONS,
    graph_contract.QUERY_STARTS,
    graph_contract.LOGIT_INDICES,
)
_SOURCE_INPUTS = (graph_contract.SOURCE_LENGTHS, graph_contract.SOURCE_TABLE)


def decoder_graph(
    model: Network,
    project: Project,
    cache_type: torch.dtype,
    device: Device,
    norm: nn.Module,
) -> Graph:
    """The decoder of a causal or a seq2seq model. `project` computes logits of hidden states, and
    `norm` the hidden states that are output."""
    caches = _caches(model, cache_type, device)
    outputs = [graph_contract.LOGITS]
    if has_hidden_output(model.config, device):
        assert isinstance(model, Transformer)
        with_hidden = HiddenStatesModule(model, project, device, norm).eval()
        outputs.append(graph_contract.HIDDEN)
        after = (graph_contract.HIDDEN_INDICES,)
        return _graph(with_hidden, _DECODER_INPUTS, caches, after, outputs)
    module = DecoderModule(model, project, device).eval()
    source = _SOURCE_INPUTS if model.config.family == "seq2seq" else ()
    return _graph(module, _DECODER_INPUTS, caches, source, outputs)


def has_hidden_output(config: ModelConfig, device: Device) -> bool:
    """Whether a decoder's graph outputs hidden states."""
    return config.family == "causal" and device == "cpu"


def encoder_graph(model: Network, cache_type: torch.dtype) -> Graph:
    """The encoder of a seq2seq model."""
    caches = _caches(model, cache_type, "cpu")
    return _graph(EncoderModule(model).eval(), _ENCODER_INPUTS, caches)


def text_encoder_graph(model: Network, project: Project) -> Graph:
    """An encoder model."""
    names = list(_TEXT_ENCODER_INPUTS)
    if model.config.num_segments:
        names.append(graph_contract.SEGMENTS)
    return Graph(
        module=TextEncoderModule(model, project).eval(),
        arguments=tuple(map(_example, names)),
        dynamic_shapes=tuple(map(_free, names)),
        input_names=names,
        output_names=[graph_contract.HIDDEN, graph_contract.LOGITS],
    )


def _graph(
    module: nn.Module,
    before: Sequence[str],
    caches: list[Tensor],
    after: Sequence[str] = (),
    outputs: Sequence[str] = (),
) -> Graph:
    """Adds the caches to the inputs and outputs."""
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


def _caches(model: Network, cache_type: torch.dtype, device: Device) -> list[Tensor]:
    config = model.config
    return [
        torch.zeros((_NUM_BLOCKS, *shape), dtype=cache_type)
        for layer in range(config.num_layers)
        for shape in graph_contract.block_shapes(device, *config.cached_of(layer))
    ]


def _pool(sides: Sequence[Tensor]) -> Pool:
    return Pool([Layer(*sides[i : i + 2]) for i in range(0, len(sides), 2)])
