"""The network as the graphs that a server runs: a decoder, and for seq2seq an encoder.

Knows: the graphs' inputs and outputs (export/bundle/graph_contract.py), which dimensions are free.
Does not know: how attention is emitted, files, what the weights are made of.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from quill.export.bundle import graph_contract
from quill.export.graph.attention import Cache, GroupQueryAttending, OwnAttending
from quill.model.network.attention import EncoderAttending, KeyValue
from quill.model.network.transformer import Transformer

# R rows · T new tokens · L logits · S source tokens · D model size · V vocabulary
# K key/value heads · C capacity · H head size

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
    """One step: new tokens in, logits and extended caches out."""

    def __init__(self, model: Transformer, project: Project, own_attention: bool) -> None:
        super().__init__()
        self.model = model
        self.project = project
        self.attending = OwnAttending if own_attention else GroupQueryAttending

    def forward(
        self,
        ids_RT: Tensor,
        seqlens_R: Tensor,
        total_length: Tensor,
        logit_indices_L: Tensor,
        past: list[Tensor],
        source_seqlens_R: Tensor | None = None,
        source_total_length: Tensor | None = None,
        past_cross: list[Tensor] | None = None,
    ) -> list[Tensor]:
        cache = Cache(_paired(past), seqlens_R, total_length)
        caches = [cache]
        if past_cross is not None:
            assert source_seqlens_R is not None
            assert source_total_length is not None
            caches.append(Cache(_paired(past_cross), source_seqlens_R, source_total_length))
        attending = self.attending(self.model.config, self.model.rotary, *caches)
        x_RTD = self.model.hidden(ids_RT, attending)
        # Before the projection: logits nobody asked for are the largest waste there is.
        x_LD = x_RTD.flatten(0, 1).index_select(0, logit_indices_L)
        logits_LV = self.project(x_LD).to(torch.float32)
        return [logits_LV, *(side for each in caches for pair in each.present for side in pair)]


class EncoderModule(nn.Module):
    """A source in, each decoder layer's keys and values out, padded to the slot's capacity."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, source_ids_1C: Tensor, positions_S: Tensor) -> list[Tensor]:
        # One source of its real length: nothing is padded, so nothing needs a mask.
        ids_1S = source_ids_1C.index_select(1, positions_S)
        attending = EncoderAttending(self.model.config, self.model.rotary, mask_BS=None)
        padding = source_ids_1C.shape[1] - ids_1S.shape[1]
        parked = self.model.park(ids_1S, attending)
        return [F.pad(side, (0, 0, 0, padding)) for pair in parked for side in pair]


def decoder_graph(
    model: Transformer, project: Project, dtype: torch.dtype, own_attention: bool = False
) -> Graph:
    """The decoder of either family. `project` turns hidden states into logits.

    `own_attention`: self-attention is Quill's own operator, not the runtime's.
    """
    module = DecoderModule(model, project, own_attention).eval()
    make = _seq2seq_decoder if model.config.family == "seq2seq" else _causal_decoder
    return make(module, dtype)


def _causal_decoder(module: DecoderModule, dtype: torch.dtype) -> Graph:
    model = module.model
    rows, tokens, num_logits = Dim("rows"), Dim("tokens"), Dim("num_logits")
    num_layers = model.config.num_layers
    # The sizes of the examples are arbitrary; that they differ shows what is free.
    past = _caches(model, 2, 8, dtype)
    return Graph(
        module=module,
        arguments=(*_step_inputs(2, 3), past),
        dynamic_shapes=(
            *({0: rows, 1: tokens}, {0: rows}, {}, {0: num_logits}),
            _cache_dims(past, "capacity"),
        ),
        input_names=[*_STEP_NAMES, *graph_contract.cache_names("past", num_layers)],
        output_names=[graph_contract.LOGITS, *graph_contract.cache_names("present", num_layers)],
    )


def _seq2seq_decoder(module: DecoderModule, dtype: torch.dtype) -> Graph:
    model = module.model
    rows, num_logits = Dim("rows"), Dim("num_logits")
    num_layers = model.config.num_layers
    past, cross = _caches(model, 2, 8, dtype), _caches(model, 2, 9, dtype)
    ids_RT, seqlens_R, total_length, indices_L = _step_inputs(2, 1)
    return Graph(
        module=module,
        arguments=(
            *(ids_RT, seqlens_R, total_length, indices_L, past),
            *(seqlens_R.clone(), total_length.clone(), cross),
        ),
        dynamic_shapes=(
            *({0: rows}, {0: rows}, {}, {0: num_logits}),
            *(_cache_dims(past, "capacity"), {0: rows}, {}),
            _cache_dims(cross, "source_capacity"),
        ),
        input_names=[
            *_STEP_NAMES,
            *graph_contract.cache_names("past", num_layers),
            graph_contract.SOURCE_SEQLENS_K,
            graph_contract.SOURCE_TOTAL_LENGTH,
            *graph_contract.cache_names("past", num_layers, cross=True),
        ],
        output_names=[
            graph_contract.LOGITS,
            *graph_contract.cache_names("present", num_layers),
            *graph_contract.cache_names("present", num_layers, cross=True),
        ],
    )


def encoder_graph(model: Transformer) -> Graph:
    """The encoder of a seq2seq model."""
    return Graph(
        module=EncoderModule(model).eval(),
        arguments=(torch.zeros(1, 8, dtype=torch.int64), torch.arange(5)),
        dynamic_shapes=({1: Dim("source_capacity")}, {0: Dim("source")}),
        input_names=[graph_contract.SOURCE_IDS, graph_contract.SOURCE_POSITIONS],
        output_names=graph_contract.cache_names("present", model.config.num_layers, cross=True),
    )


_STEP_NAMES = [
    graph_contract.INPUT_IDS,
    graph_contract.SEQLENS_K,
    graph_contract.TOTAL_LENGTH,
    graph_contract.LOGIT_INDICES,
]


def _step_inputs(rows: int, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.zeros(rows, tokens, dtype=torch.int64),
        torch.full((rows,), tokens - 1, dtype=torch.int32),
        torch.tensor(tokens, dtype=torch.int32),
        torch.arange(rows + 2),
    )


def _caches(model: Transformer, rows: int, capacity: int, dtype: torch.dtype) -> list[Tensor]:
    config = model.config
    shape = (rows, config.num_kv_heads, capacity, config.head_size)
    return [torch.zeros(shape, dtype=dtype) for _ in range(2 * config.num_layers)]


def _cache_dims(caches: Sequence[Tensor], capacity: str) -> list[dict[int, Any]]:
    return [{0: Dim("rows"), 2: Dim(capacity)} for _ in caches]


def _paired(sides: Sequence[Tensor]) -> list[KeyValue]:
    return [KeyValue(*sides[i : i + 2]) for i in range(0, len(sides), 2)]
