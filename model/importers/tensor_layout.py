"""Which tensors of somebody else's checkpoint make up each of ours.

Knows: our names and shapes, and the order of what we fuse: queries, keys, values; gate, value.
Does not know: files, number formats.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from quill.model.errors import CheckpointError, UnsupportedError, first_few
from quill.model.network.config import ModelConfig

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


Layout = dict[str, list[Part]]  # parts are stacked along the outputs


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


def llama_layout(config: ModelConfig, names: LlamaNames, interleaved: bool) -> Layout:
    layout = {
        "embedding.weight": [Part(f"{names.embedding}.weight", (config.vocab_size, config.d_model))]
    }
    for index in range(config.num_layers):
        source = names.layer.format(index)
        for name, parts in _llama_layer(config, names, interleaved).items():
            layout[f"decoder.{index}.{name}"] = [
                part._replace(name=f"{source}.{part.name}") for part in parts
            ]
    layout["decoder_norm.weight"] = [Part(f"{names.final_norm}.weight", (config.d_model,))]
    if not config.tied_embeddings:
        shape = (config.vocab_size, config.d_model)
        layout["projection.weight"] = [Part(f"{names.projection}.weight", shape)]
    return layout


def _llama_layer(config: ModelConfig, names: LlamaNames, interleaved: bool) -> Layout:
    d_model, d_ff = config.d_model, config.d_ff
    width, kv_width = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    num_heads, num_kv_heads = (config.num_heads, config.num_kv_heads) if interleaved else (0, 0)
    layer = {
        "attention_residual.norm.weight": [Part(f"{names.attention_norm}.weight", (d_model,))],
        "attention.qkv.weight": [
            Part(f"{names.query}.weight", (width, d_model), interleaved_heads=num_heads),
            Part(f"{names.key}.weight", (kv_width, d_model), interleaved_heads=num_kv_heads),
            Part(f"{names.value}.weight", (kv_width, d_model)),
        ],
        "attention.out.weight": [Part(f"{names.attention_out}.weight", (d_model, width))],
        "feed_forward_residual.norm.weight": [
            Part(f"{names.feed_forward_norm}.weight", (d_model,))
        ],
        "feed_forward.up.weight": [
            Part(f"{names.gate}.weight", (d_ff, d_model)),
            Part(f"{names.up}.weight", (d_ff, d_model)),
        ],
        "feed_forward.down.weight": [Part(f"{names.down}.weight", (d_model, d_ff))],
    }
    return layer | _biases(config, layer)


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
        if has_bias
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
