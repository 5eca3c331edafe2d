"""Which tensors of an imported checkpoint make up each of Quill's.

Knows: our names and shapes, the order of what we fuse (queries, keys, values; gate, value) and of
rows that are turned.
Does not know: files, number formats.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quill.model.checkpoint.quantized_weight import MAX_EXPONENT, Raw
from quill.model.errors import CheckpointError, UnsupportedError, first_few
from quill.model.network.config import Experts, ModelConfig, ShortConv
from quill.model.network.layers import GATED

Order = npt.NDArray[np.intp]


class Part(NamedTuple):
    """One tensor of the source."""

    name: str
    shape: tuple[int, ...]  # as it lies in the source
    transposed: bool = False  # inputs first
    order: Order | None = None  # where our rows are in the source
    plus: float = 0.0  # added to each number
    times: float = 1.0  # which is multiplied by this
    place: int | None = None  # of the matrix, where the source has several in one tensor
    stacked: bool = False  # several in one tensor become one matrix, one after another


Layout = dict[str, list[Part]]  # parts are stacked along the outputs


def linear(
    ours: str, theirs: Sequence[str], shape: tuple[int, int], transposed: bool = False
) -> Layout:
    """A matrix of (outputs, inputs), or of several stacked ones of that shape, and the biases."""
    matrix = shape[::-1] if transposed else shape
    return {
        f"{ours}.weight": [Part(f"{each}.weight", matrix, transposed) for each in theirs],
        f"{ours}.bias": [Part(f"{each}.bias", shape[:1]) for each in theirs],
    }


def layer_norm(
    ours: str, theirs: str, size: int, names: tuple[str, str] = ("weight", "bias")
) -> Layout:
    return {
        f"{ours}.{kind}": [Part(f"{theirs}.{name}", (size,))]
        for kind, name in zip(("weight", "bias"), names, strict=True)
    }


def _deinterleaved(num_heads: int, num_rows: int, rotary_rows: int) -> Order:
    """Interleaved rotation turns the rows 0 and 1, 2 and 3, …; Quill row i and i + half. The rotary
    rows are the last of each head."""
    index = np.arange(num_rows).reshape(num_heads, -1)
    still, turned = np.split(index, [index.shape[1] - rotary_rows], axis=1)
    return np.concatenate((still, turned[:, 0::2], turned[:, 1::2]), axis=1).reshape(-1)


def _rotary_last(num_heads: int, num_rows: int, config: ModelConfig) -> Order | None:
    """The first rows are that many heads, whose rotary parts come first; Quill has them last."""
    size, turned = config.head_size, config.partial_rotary_size
    if not turned:
        return None
    heads, rest = np.split(np.arange(num_rows), [num_heads * size])
    heads = np.roll(heads.reshape(num_heads, size), -turned, axis=1)
    return np.concatenate((heads.reshape(-1), rest))


def _by_kind(config: ModelConfig) -> Order:
    """Each head's query, key and value are together; Quill has all queries first, then keys."""
    index = np.arange(3 * config.num_heads * config.head_size)
    order: Order = index.reshape(config.num_heads, 3, -1).swapaxes(0, 1).reshape(-1)
    turned = _rotary_last(2 * config.num_heads, len(order), config)
    return order if turned is None else order[turned]


class LlamaNames(NamedTuple):
    """How a source names the tensors of the Llama shape. `layer` has a place for the number."""

    embedding: str
    final_norm: str
    projection: str
    layer: str
    attention_norm: str
    query: str
    key: str
    value: str
    attention_out: str
    feed_forward_norm: str
    gate: str
    up: str
    down: str
    # What came after.
    qkv: str = ""  # one matrix in the place of three
    qkv_by_head: bool = False  # in which each head's three are together
    gate_up: str = ""  # one in the place of two
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    attention_after: str = ""  # the norm after it, where there is one before it as well
    feed_forward_after: str = ""
    norm_plus: float = 0.0  # norms are stored without it
    router: str = ""
    balance: str = ""  # what is added to experts' scores when they are chosen
    expert: str = ""  # with a place for its number, followed by the names of gate, up and down
    expert_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked_experts: tuple[str, str, str] | None = None  # gates, ups and downs of all experts
    fused_experts: tuple[str, str] | None = None  # the same: gates and ups by turns, and downs
    experts_transposed: bool = False  # these, inputs first
    sinks: str = "self_attn.sinks"
    conv: str = ""  # a short convolution's kernel, and the matrices before and after it
    conv_in: str = ""
    conv_out: str = ""
    conv_nested: bool = False  # the kernel has one channel for each of its groups
    shared_experts: str = ""
    shared_gate: str = ""
    logit_scale: float = 1.0  # of the last norm, and so of logits


def llama_layout(config: ModelConfig, names: LlamaNames, interleaved: bool) -> Layout:
    layout = {
        "embedding.weight": [Part(f"{names.embedding}.weight", (config.vocab_size, config.d_model))]
    }
    for index in range(config.num_layers):
        source = names.layer.format(index)
        for name, parts in _llama_layer(config, names, interleaved, index).items():
            layout[f"decoder.{index}.{name}"] = [
                part._replace(name=f"{source}.{part.name}") for part in parts
            ]
    (norm,) = _norm(names, names.final_norm, config.d_model)
    layout["decoder_norm.weight"] = [norm._replace(times=names.logit_scale)]
    if not config.tied_embeddings:
        shape = (config.vocab_size, config.d_model)
        layout["projection.weight"] = [Part(f"{names.projection}.weight", shape)]
    if config.output_bias:
        layout["output_bias"] = [Part(f"{names.projection}.bias", (config.vocab_size,))]
    if config.norm == "layer":
        norms = {name: parts for name, parts in layout.items() if name.endswith("norm.weight")}
        layout |= {_bias(name): [_bias_of(part) for part in norms[name]] for name in norms}
    return layout


def _norm(names: LlamaNames, name: str, size: int) -> list[Part]:
    return [Part(f"{name}.weight", (size,), plus=names.norm_plus)]


def _llama_layer(config: ModelConfig, names: LlamaNames, interleaved: bool, index: int) -> Layout:
    layer = {
        "attention_residual.norm.weight": _norm(names, names.attention_norm, config.d_model),
        **_mixing(config, names, interleaved, index),
        "feed_forward_residual.norm.weight": _norm(names, names.feed_forward_norm, config.d_model),
    }
    if config.norm_placement == "sandwich":
        for ours, theirs in (
            ("attention", names.attention_after),
            ("feed_forward", names.feed_forward_after),
        ):
            layer[f"{ours}_residual.after.weight"] = _norm(names, theirs, config.d_model)
    if config.experts is None or index < config.experts.dense_layers:
        layer |= _feed_forward(config, names)
    else:
        layer |= _experts(config, names, config.experts)
    return layer | _biases(config, layer)


def _mixing(config: ModelConfig, names: LlamaNames, interleaved: bool, index: int) -> Layout:
    if config.latent is not None:
        return _latent(config)
    if config.short_conv is not None and config.is_conv(index):
        return _short_conv(config, names, config.short_conv)
    return _attention(config, names, interleaved)


def _short_conv(config: ModelConfig, names: LlamaNames, conv: ShortConv) -> Layout:
    d_model, nested = config.d_model, (1,) if names.conv_nested else ()
    kernel = Part(f"{names.conv}.weight", (d_model, *nested, conv.taps), stacked=names.conv_nested)
    layout = {
        "attention.kernel_DL": [kernel],
        "attention.into.weight": [Part(f"{names.conv_in}.weight", (3 * d_model, d_model))],
        "attention.out.weight": [Part(f"{names.conv_out}.weight", (d_model, d_model))],
    }
    if conv.bias:
        layout["attention.bias_D"] = [Part(f"{names.conv}.bias", (d_model,))]
        for name in ("attention.into", "attention.out"):
            layout[f"{name}.bias"] = [_bias_of(part) for part in layout[f"{name}.weight"]]
    return layout


def _attention(config: ModelConfig, names: LlamaNames, interleaved: bool) -> Layout:
    d_model, num_heads, num_kv_heads = config.d_model, config.num_heads, config.num_kv_heads
    width, kv_width = num_heads * config.head_size, num_kv_heads * config.head_size

    def turned(name: str, heads: int) -> Part:
        num_rows = heads * config.head_size
        order = (
            _deinterleaved(heads, num_rows, config.head_size)
            if interleaved
            else _rotary_last(heads, num_rows, config)
        )
        return Part(f"{name}.weight", (num_rows, d_model), order=order)

    qkv = [turned(names.query, num_heads), turned(names.key, num_kv_heads)]
    qkv += [Part(f"{names.value}.weight", (kv_width, d_model))]
    if names.qkv:
        num_rows = width + 2 * kv_width
        order = _rotary_last(num_heads + num_kv_heads, num_rows, config)
        order = _by_kind(config) if names.qkv_by_head else order
        qkv = [Part(f"{names.qkv}.weight", (num_rows, d_model), order=order)]
    layout = {
        "attention.qkv.weight": qkv,
        "attention.out.weight": [Part(f"{names.attention_out}.weight", (d_model, width))],
    }
    if config.qk_norm != "none":
        sizes = (config.head_size,) * 2 if config.qk_norm == "head" else (width, kv_width)
        layout["attention.qk_norm.query.weight"] = _norm(names, names.query_norm, sizes[0])
        layout["attention.qk_norm.key.weight"] = _norm(names, names.key_norm, sizes[1])
    if config.attention_sinks:
        layout["attention.sinks_N"] = [Part(names.sinks, (num_heads,))]
    return layout


def _latent(config: ModelConfig) -> Layout:
    """Latent attention, by DeepSeek's names: it is theirs. Its rotation is interleaved."""
    assert config.latent is not None
    rank, query_rank, rope_size, nope_size, value_size = dataclasses.astuple(config.latent)
    num_heads, d_model = config.num_heads, config.d_model
    width, inputs = num_heads * config.head_size, query_rank or d_model
    query = Part(
        f"self_attn.{'q_b_proj' if query_rank else 'q_proj'}.weight",
        (width, inputs),
        order=_deinterleaved(num_heads, width, rope_size),
    )
    latent = Part(
        "self_attn.kv_a_proj_with_mqa.weight",
        (rank + rope_size, d_model),
        order=_deinterleaved(1, rank + rope_size, rope_size),
    )
    out = Part("self_attn.o_proj.weight", (d_model, num_heads * value_size))
    up = Part("self_attn.kv_b_proj.weight", (num_heads * (nope_size + value_size), rank))
    layout = {
        "attention.query.weight": [query],
        "attention.latent.weight": [latent],
        "attention.latent_norm.weight": [Part("self_attn.kv_a_layernorm.weight", (rank,))],
        "attention.up.weight": [up],
        "attention.out.weight": [out],
    }
    if query_rank:
        down = Part("self_attn.q_a_proj.weight", (query_rank, d_model))
        layout["attention.query_down.weight"] = [down]
        norm = Part("self_attn.q_a_layernorm.weight", (query_rank,))
        layout["attention.query_norm.weight"] = [norm]
    return layout


def _feed_forward(config: ModelConfig, names: LlamaNames) -> Layout:
    d_model, d_ff = config.d_model, config.d_ff
    up = [
        Part(f"{names.gate}.weight", (d_ff, d_model)),
        Part(f"{names.up}.weight", (d_ff, d_model)),
    ]
    if config.activation not in GATED:
        up = up[1:]
    if names.gate_up:
        up = [Part(f"{names.gate_up}.weight", (2 * d_ff, d_model))]
    return {
        "feed_forward.up.weight": up,
        "feed_forward.down.weight": [Part(f"{names.down}.weight", (d_model, d_ff))],
    }


def _experts(config: ModelConfig, names: LlamaNames, experts: Experts) -> Layout:
    """Stacked one after another, each with its gate before its value."""
    d_model, d_expert, (gate, up, down) = config.d_model, experts.d_expert, names.expert_parts

    def of_each(part: str, shape: tuple[int, int], index: int) -> Part:
        if names.stacked_experts is not None:
            stack = names.stacked_experts[names.expert_parts.index(part)]
            return Part(f"{stack}.weight", (experts.number, *shape), place=index)
        return Part(f"{names.expert.format(index)}.{part}.weight", shape)

    layout = {
        "feed_forward.router.weight": [Part(f"{names.router}.weight", (experts.number, d_model))],
        "feed_forward.up.weight": [
            of_each(part, (d_expert, d_model), index)
            for index in range(experts.number)
            for part in (gate, up)
        ],
        "feed_forward.down.weight": [
            of_each(down, (d_model, d_expert), index) for index in range(experts.number)
        ],
    }
    if names.fused_experts is not None:
        layout |= _fused_experts(config, names, experts, names.fused_experts)
    if experts.bias:
        for name, bias_of in (("router", _bias_of), ("up", _expert_bias), ("down", _expert_bias)):
            parts = layout[f"feed_forward.{name}.weight"]
            layout[f"feed_forward.{name}.bias"] = [bias_of(part) for part in parts]
    if experts.balanced:
        layout["feed_forward.balance_E"] = [Part(names.balance, (experts.number,))]
    if experts.num_shared:
        d_shared, shared = experts.num_shared * d_expert, names.shared_experts
        layout["feed_forward.shared.up.weight"] = [
            Part(f"{shared}.{part}.weight", (d_shared, d_model)) for part in (gate, up)
        ]
        layout["feed_forward.shared.down.weight"] = [
            Part(f"{shared}.{down}.weight", (d_model, d_shared))
        ]
    if experts.shared_gate:
        layout["feed_forward.shared.gate_1D"] = [Part(f"{names.shared_gate}.weight", (1, d_model))]
    return layout


def _fused_experts(
    config: ModelConfig, names: LlamaNames, experts: Experts, tensors: tuple[str, str]
) -> Layout:
    """All experts in one tensor. Of each the first row is a gate's, the next its value's, …"""
    number, d_model, d_expert = experts.number, config.d_model, experts.d_expert
    rows = np.arange(number * 2 * d_expert).reshape(number, d_expert, 2)
    layout: Layout = {}
    for name, tensor, outputs, inputs, order in (
        ("up", tensors[0], 2 * d_expert, d_model, rows.swapaxes(1, 2).reshape(-1)),
        ("down", tensors[1], d_model, d_expert, None),
    ):
        sizes = (inputs, outputs) if names.experts_transposed else (outputs, inputs)
        part = Part(tensor, (number, *sizes), names.experts_transposed, order, stacked=True)
        layout[f"feed_forward.{name}.weight"] = [part]
    return layout


def _expert_bias(part: Part) -> Part:
    if not part.stacked:
        return part._replace(name=_bias(part.name), shape=part.shape[:-1])
    shape = (part.shape[0], part.shape[2 if part.transposed else 1])
    return part._replace(name=f"{part.name}_bias", shape=shape, transposed=False)


def _biases(config: ModelConfig, layer: Layout) -> Layout:
    """A bias stands beside its matrix and is as long as the matrix has outputs."""
    biased = {
        "attention.qkv": config.qkv_bias,
        "attention.out": config.attention_out_bias,
        "feed_forward.up": config.ff_bias,
        "feed_forward.down": config.ff_bias,
    }
    return {
        f"{name}.bias": [_bias_of(part) for part in layer[f"{name}.weight"]]
        for name, has_bias in biased.items()
        if has_bias and f"{name}.weight" in layer
    }


def _bias_of(part: Part) -> Part:
    return part._replace(name=_bias(part.name), shape=part.shape[:1])


def _bias(name: str) -> str:
    return name.removesuffix("weight") + "bias"


def check_finite(name: str, tensor: Tensor) -> Tensor:
    """Refuses, by name, a tensor with a NaN or an infinity. The sum of any is not finite, either:
    it is half the work of looking at each, and a finite tensor whose sum overflows is looked at."""
    if not tensor.is_meta and not tensor.sum().isfinite() and not tensor.isfinite().all():
        raise CheckpointError(
            f"tensor {name} has a NaN or an infinity: the model was damaged before it was saved, "
            "or the file was afterwards"
        )
    return tensor


def check_exponents(name: str, exponents: Raw) -> None:
    """Refuses, by name, MXFP4 blocks that don't stand for numbers."""
    if (exponents > MAX_EXPONENT).any():
        check_finite(name, torch.tensor(torch.nan))


def check_source(layout: Layout, shapes: Mapping[str, tuple[int, ...]], origin: str) -> None:
    """Refuses, by name, tensors that are missing, of another shape, or not known."""
    parts = {part.name: part for parts in layout.values() for part in parts}
    missing = [name for name in parts if name not in shapes]
    if missing:
        raise CheckpointError(f"{origin} lacks {first_few(missing)}; it isn't a whole model")
    for name, part in parts.items():
        if shapes[name] != part.shape:
            raise CheckpointError(
                f"tensor {name} of {origin} has the shape {shapes[name]}; the model's sizes ask "
                f"for {part.shape}"
            )
    unknown = sorted(set(shapes) - set(parts))
    if unknown:
        raise UnsupportedError(
            f"{origin} has tensors that Quill has no place for: {first_few(unknown)}. Without "
            "them the model would compute something else"
        )
