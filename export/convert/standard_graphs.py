"""The network as graphs that any ONNX runtime computes, with the names that others give them.

Knows: inputs and outputs as transformers, optimum and onnxruntime-genai name them, dynamic
dimensions. Does not know: how attention is emitted (export/convert/attention.py), files.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim

from quill.export.convert.attention import StandardAttention
from quill.export.graph.graphs import Graph
from quill.model.network.attention import KeyValue
from quill.model.network.transformer import Transformer

# B batch · T new tokens · S source tokens, or past and new ones
# D model size · V vocabulary

IDS, MASK, POSITIONS = "input_ids", "attention_mask", "position_ids"
SEGMENTS, HIDDEN, LOGITS = "token_type_ids", "last_hidden_state", "logits"
SOURCE_MASK, SOURCE_HIDDEN = "encoder_attention_mask", "encoder_hidden_states"
PAST, PRESENT = "past_key_values.{}", "present.{}"

# Different, so that the tracer tells dynamic dimensions apart.
_SIZES = {"batch_size": 2, "sequence_length": 3, "past_length": 4, "total_length": 7}
_SIZES |= {"source_length": 5}


class _Input(NamedTuple):
    """Dimensions with names are dynamic."""

    name: str
    shape: tuple[str | int, ...]
    dtype: torch.dtype = torch.int64

    def example(self) -> Tensor:
        shape = [_SIZES[each] if isinstance(each, str) else each for each in self.shape]
        return torch.ones(shape, dtype=self.dtype)

    def dynamic(self) -> dict[int, Any]:
        return {axis: Dim(each) for axis, each in enumerate(self.shape) if isinstance(each, str)}


_IDS = _Input(IDS, ("batch_size", "sequence_length"))
_MASK = _Input(MASK, ("batch_size", "total_length"))
_SOURCE_MASK = _Input(SOURCE_MASK, ("batch_size", "source_length"))


def graphs(model: Transformer) -> Mapping[str, Graph]:
    """By the names of their files."""
    match model.config.family:
        case "causal":
            return {"model.onnx": _decoder(model)}
        case "encoder":
            return {"model.onnx": _encoder(model)}
        case "seq2seq":
            return {
                "encoder_model.onnx": _encoder(model),
                "decoder_model.onnx": _first_step(model),
                "decoder_with_past_model.onnx": _next_step(model),
            }


class _Module(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model


class _Decoder(_Module):
    def forward(
        self, ids_BT: Tensor, mask_BS: Tensor, positions_BT: Tensor, pasts: list[Tensor]
    ) -> list[Tensor]:
        model = self.model
        attention = StandardAttention(
            model.config, model.rotary, mask_BS, positions_BT, _pairs(pasts)
        )
        logits_BTV = _logits(model, model.hidden(ids_BT, attention))
        return [logits_BTV, *_flat(attention.presents)]


class _Encoder(_Module):
    def forward(
        self, ids_BT: Tensor, mask_BT: Tensor, segments_BT: Tensor | None = None
    ) -> list[Tensor]:
        model = self.model
        positions_BT = torch.arange(ids_BT.shape[1]).expand_as(ids_BT)
        bias_NR = model.relative("encoder")
        attention = StandardAttention(
            model.config, model.rotary, mask_BT, positions_BT, bias_NR=bias_NR
        )
        hidden_BTD = model.memory(ids_BT, attention, segments_BT)
        if model.config.num_classes:  # of the first token
            return [hidden_BTD, _logits(model, hidden_BTD[:, :1]).squeeze(1)]
        return [hidden_BTD, *([_logits(model, hidden_BTD)] if model.config.masked_head else [])]


class _FirstStep(_Module):
    """Tokens of an answer, and the source's keys and values of each layer."""

    def forward(self, source_mask_BS: Tensor, ids_BT: Tensor, memory_BSD: Tensor) -> list[Tensor]:
        cross = [layer.source_key_value(memory_BSD) for layer in self.model.cross_attentions()]
        sizes = self.model.config.cached
        none = memory_BSD.new_zeros((ids_BT.shape[0], sizes.num_heads, 0, sizes.key_size))
        pasts = [KeyValue(none, none)] * self.model.config.num_layers
        logits_BTV, presents = _answer(self.model, ids_BT, pasts, cross, source_mask_BS)
        both = (_flat(pair) for pair in zip(presents, cross, strict=True))
        return [logits_BTV, *(side for four in both for side in four)]


class _NextStep(_Module):
    """The same with the keys and values of both."""

    def forward(self, source_mask_BS: Tensor, ids_BT: Tensor, pasts: list[Tensor]) -> list[Tensor]:
        pairs = _pairs(pasts)
        logits_BTV, presents = _answer(self.model, ids_BT, pairs[0::2], pairs[1::2], source_mask_BS)
        return [logits_BTV, *_flat(presents)]


def _answer(
    model: Transformer,
    ids_BT: Tensor,
    pasts: Sequence[KeyValue],
    cross: Sequence[KeyValue],
    source_mask_BS: Tensor,
) -> tuple[Tensor, list[KeyValue]]:
    num_past = pasts[0].k_BKSH.shape[2]
    positions_BT = (torch.arange(ids_BT.shape[1]) + num_past).expand_as(ids_BT)
    mask_BS = torch.ones((ids_BT.shape[0], num_past + ids_BT.shape[1]), dtype=torch.bool)
    attention = StandardAttention(
        model.config,
        model.rotary,
        mask_BS,
        positions_BT,
        pasts,
        cross,
        source_mask_BS,
        model.relative("decoder"),
    )
    return _logits(model, model.hidden(ids_BT, attention)), attention.presents


def _logits(model: Transformer, x_BTD: Tensor) -> Tensor:
    """Of a list of tokens: see FlatLinear."""
    logits = model.project(x_BTD.flatten(0, 1))
    return logits.reshape(*x_BTD.shape[:2], logits.shape[-1])


def _decoder(model: Transformer) -> Graph:
    inputs = [_IDS, _MASK, _IDS._replace(name=POSITIONS)]
    pasts = _pasts(model, {"": "past_length"})
    return _graph(_Decoder(model), inputs, pasts, [LOGITS, *_names(model, PRESENT, [""])])


def _encoder(model: Transformer) -> Graph:
    inputs = [_IDS, _IDS._replace(name=MASK)]
    inputs += [_IDS._replace(name=SEGMENTS)] if model.config.num_segments else []
    has_logits = model.config.masked_head or model.config.num_classes
    outputs = [HIDDEN, *([LOGITS] if has_logits else [])]
    return _graph(_Encoder(model), inputs, [], outputs)


def _first_step(model: Transformer) -> Graph:
    shape = ("batch_size", "source_length", model.config.d_model)
    inputs = [_SOURCE_MASK, _IDS, _Input(SOURCE_HIDDEN, shape, torch.float32)]
    outputs = [LOGITS, *_names(model, PRESENT, [".decoder", ".encoder"])]
    return _graph(_FirstStep(model), inputs, [], outputs)


def _next_step(model: Transformer) -> Graph:
    pasts = _pasts(model, {".decoder": "past_length", ".encoder": "source_length"})
    outputs = [LOGITS, *_names(model, PRESENT, [".decoder"])]
    return _graph(_NextStep(model), [_SOURCE_MASK, _IDS], pasts, outputs)


def _graph(
    module: nn.Module, inputs: list[_Input], pasts: list[_Input], outputs: list[str]
) -> Graph:
    examples: tuple[Any, ...] = tuple(each.example() for each in inputs)
    dynamic: tuple[Any, ...] = tuple(each.dynamic() for each in inputs)
    if pasts:
        examples += ([each.example() for each in pasts],)
        dynamic += ([each.dynamic() for each in pasts],)
    names = [each.name for each in (*inputs, *pasts)]
    return Graph(module.eval(), examples, dynamic, names, outputs)


def _pasts(model: Transformer, lengths: Mapping[str, str]) -> list[_Input]:
    """`lengths`: the dimension of each kind of keys and values."""
    names = iter(_names(model, PAST, list(lengths)))
    return [
        _Input(next(names), ("batch_size", sizes.num_heads, length, size), torch.float32)
        for sizes in map(model.config.cached_of, range(model.config.num_layers))
        for length in lengths.values()
        for size in (sizes.key_size, sizes.value_size)
    ]


def _names(model: Transformer, pattern: str, kinds: Sequence[str]) -> list[str]:
    return [
        f"{pattern.format(layer)}{kind}.{side}"
        for layer in range(model.config.num_layers)
        for kind in kinds
        for side in ("key", "value")
    ]


def _pairs(sides: Sequence[Tensor]) -> list[KeyValue]:
    return [KeyValue(*sides[i : i + 2]) for i in range(0, len(sides), 2)]


def _flat(pairs: Iterable[KeyValue]) -> list[Tensor]:
    return [side for pair in pairs for side in pair]
