"""Which tensors of an imported checkpoint make up each of Quill's.

Knows: our names and shapes, and the order of what we fuse: queries, keys, values; gate, value.
Does not know: files, number formats.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from quill.model.errors import CheckpointError, UnsupportedError, first_few
from quill.model.network.config import Experts, ModelConfig

Track = Callable[[Sequence[str]], Iterable[str]]


def untracked(names: Sequence[str]) -> Iterable[str]:
    """The names as they come, with no progress shown."""
    return names


class Part(NamedTuple):
    """One tensor of the source."""

    name: str
    shape: tuple[int, ...]  # as it lies in the source
    transposed: bool = False  # inputs first
    interleaved_heads: int = 0  # rows of that many heads, in the order of interleaved rotation
    interleaved_rows: int = 0  # of them the last so many of each head; 0: all
    plus: float = 0.0  # added to each number


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
    shared_experts: str = ""


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
    layout["decoder_norm.weight"] = _norm(names, names.final_norm, config.d_model)
    if not config.tied_embeddings:
        shape = (config.vocab_size, config.d_model)
        layout["projection.weight"] = [Part(f"{names.projection}.weight", shape)]
    return layout


def _norm(names: LlamaNames, name: str, size: int) -> list[Part]:
    return [Part(f"{name}.weight", (size,), plus=names.norm_plus)]


def _llama_layer(config: ModelConfig, names: LlamaNames, interleaved: bool, index: int) -> Layout:
    layer = {
        "attention_residual.norm.weight": _norm(names, names.attention_norm, config.d_model),
        **(_attention(config, names, interleaved) if config.latent is None else _latent(config)),
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


def _attention(config: ModelConfig, names: LlamaNames, interleaved: bool) -> Layout:
    d_model = config.d_model
    width, kv_width = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    num_heads, num_kv_heads = (config.num_heads, config.num_kv_heads) if interleaved else (0, 0)
    qkv = [
        Part(f"{names.query}.weight", (width, d_model), interleaved_heads=num_heads),
        Part(f"{names.key}.weight", (kv_width, d_model), interleaved_heads=num_kv_heads),
        Part(f"{names.value}.weight", (kv_width, d_model)),
    ]
    if names.qkv:
        qkv = [Part(f"{names.qkv}.weight", (width + 2 * kv_width, d_model))]
    layout = {
        "attention.qkv.weight": qkv,
        "attention.out.weight": [Part(f"{names.attention_out}.weight", (d_model, width))],
    }
    if config.qk_norm != "none":
        sizes = (config.head_size,) * 2 if config.qk_norm == "head" else (width, kv_width)
        layout["attention.qk_norm.query.weight"] = _norm(names, names.query_norm, sizes[0])
        layout["attention.qk_norm.key.weight"] = _norm(names, names.key_norm, sizes[1])
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
        interleaved_heads=num_heads,
        interleaved_rows=rope_size,
    )
    latent = Part(
        "self_attn.kv_a_proj_with_mqa.weight",
        (rank + rope_size, d_model),
        interleaved_heads=1,
        interleaved_rows=rope_size,
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
    if names.gate_up:
        up = [Part(f"{names.gate_up}.weight", (2 * d_ff, d_model))]
    return {
        "feed_forward.up.weight": up,
        "feed_forward.down.weight": [Part(f"{names.down}.weight", (d_model, d_ff))],
    }


def _experts(config: ModelConfig, names: LlamaNames, experts: Experts) -> Layout:
    """Stacked one after another, each with its gate before its value."""
    d_model, d_expert, (gate, up, down) = config.d_model, experts.d_expert, names.expert_parts
    of_each = [names.expert.format(index) for index in range(experts.number)]
    layout = {
        "feed_forward.router.weight": [Part(f"{names.router}.weight", (experts.number, d_model))],
        "feed_forward.up.weight": [
            Part(f"{name}.{part}.weight", (d_expert, d_model))
            for name in of_each
            for part in (gate, up)
        ],
        "feed_forward.down.weight": [
            Part(f"{name}.{down}.weight", (d_model, d_expert)) for name in of_each
        ],
    }
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
    return layout


def _biases(config: ModelConfig, layer: Layout) -> Layout:
    """A bias stands beside its matrix and is as long as the matrix has outputs."""
    biased = {
        "attention.qkv": config.qkv_bias,
        "attention.out": config.attention_out_bias,
        "feed_forward.up": config.ff_bias,
        "feed_forward.down": config.ff_bias,
    }
    return {
        f"{name}.bias": [
            part._replace(name=part.name.removesuffix("weight") + "bias", shape=part.shape[:1])
            for part in layer[f"{name}.weight"]
        ]
        for name, has_bias in biased.items()
        if has_bias and f"{name}.weight" in layer
    }


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
