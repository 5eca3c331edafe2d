"""Reads Marian's Transformers, the paper's own shape, as Hugging Face keeps them.

Knows: the settings and tensors of MarianMTModel, and where its columns stand.
Does not know: files (model/importers/huggingface_weights.py), text.

Marian puts all sines of a position before all cosines, where the paper and Quill let them
alternate. A network doesn't care in which order its columns stand, as long as all its parts
agree, so the columns are put into our order once, at import.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from quill.model.checkpoint.typed_values import TypedValues
from quill.model.errors import UnsupportedError
from quill.model.importers.tensor_layout import Layout, Part
from quill.model.network.config import Activation, ModelConfig

_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
}
# What every Marian model on the hub has. Older settings named these; newer code assumes them.
_USUAL = {
    "share_encoder_decoder_embeddings": True,
    "tie_word_embeddings": True,
    "static_position_embeddings": True,
    "normalize_before": False,
    "normalize_embedding": False,
    "add_final_layer_norm": False,
}
BANNED = -1e4  # the bias of a token that is never generated; float16 can represent it

# Whose inputs, and whose outputs, are the model's columns.
_READERS = ("embedding", "attention.qkv", "cross.query", "cross.key_value", "feed_forward.up")
_WRITERS = ("attention.out", "cross.out", "feed_forward.down", ".norm")


def read_marian_config(settings: TypedValues) -> ModelConfig:
    for name, value in _USUAL.items():
        if settings.flag(name, value) != value:
            raise UnsupportedError(f"the model has {name} {not value}; Quill knows {value} only")
    activation = settings.text("activation_function", "gelu")
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise UnsupportedError(
            f"the model's activation_function is {activation!r}; Quill knows {known}"
        )
    d_model = settings.integer("d_model")
    num_heads = _same_on_both_sides(settings, "attention_heads")
    return ModelConfig(
        family="seq2seq",
        vocab_size=settings.integer("vocab_size"),
        context=settings.integer("max_position_embeddings"),
        d_model=d_model,
        num_layers=settings.integer("decoder_layers"),
        num_encoder_layers=settings.integer("encoder_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=d_model // max(num_heads, 1),
        d_ff=_same_on_both_sides(settings, "ffn_dim"),
        positions="sinusoidal",
        norm="layer",
        norm_placement="post",
        activation=_ACTIVATIONS[activation],
        qkv_bias=True,
        attention_out_bias=True,
        ff_bias=True,
        output_bias=True,
        scale_embeddings=settings.flag("scale_embedding", False),
    )


def _same_on_both_sides(settings: TypedValues, name: str) -> int:
    encoder, decoder = (settings.integer(f"{side}_{name}") for side in ("encoder", "decoder"))
    if encoder != decoder:
        raise UnsupportedError(
            f"the model's encoder_{name} is {encoder} and its decoder_{name} is {decoder}; Quill "
            "needs them to be equal"
        )
    return encoder


def marian_layout(config: ModelConfig) -> Layout:
    vocab_size, d_model = config.vocab_size, config.d_model
    layout = {
        "embedding.weight": [Part("model.shared.weight", (vocab_size, d_model))],
        "output_bias": [Part("final_logits_bias", (1, vocab_size))],
    }
    for side, num_layers in (
        ("encoder", config.num_encoder_layers),
        ("decoder", config.num_layers),
    ):
        for index in range(num_layers):
            layer = _layer(config, f"model.{side}.layers.{index}", has_cross=side == "decoder")
            layout |= {f"{side}.{index}.{name}": parts for name, parts in layer.items()}
    return layout


def _layer(config: ModelConfig, theirs: str, has_cross: bool) -> Layout:
    d_model, d_ff = config.d_model, config.d_ff
    width = config.num_heads * config.head_size
    linears = {
        "attention.qkv": ([f"self_attn.{x}_proj" for x in "qkv"], width, d_model),
        "attention.out": (["self_attn.out_proj"], d_model, width),
        "feed_forward.up": (["fc1"], d_ff, d_model),
        "feed_forward.down": (["fc2"], d_model, d_ff),
    }
    norms = {"attention": "self_attn_layer_norm", "feed_forward": "final_layer_norm"}
    if has_cross:
        linears |= {
            "cross.query": (["encoder_attn.q_proj"], width, d_model),
            "cross.key_value": ([f"encoder_attn.{x}_proj" for x in "kv"], width, d_model),
            "cross.out": (["encoder_attn.out_proj"], d_model, width),
        }
        norms["cross"] = "encoder_attn_layer_norm"
    layer: Layout = {}
    for name, (sources, num_outputs, num_inputs) in linears.items():
        matrix, vector = (num_outputs, num_inputs), (num_outputs,)
        layer[f"{name}.weight"] = [Part(f"{theirs}.{each}.weight", matrix) for each in sources]
        layer[f"{name}.bias"] = [Part(f"{theirs}.{each}.bias", vector) for each in sources]
    for name, source in norms.items():
        for kind in ("weight", "bias"):
            layer[f"{name}_residual.norm.{kind}"] = [Part(f"{theirs}.{source}.{kind}", (d_model,))]
    return layer


def in_our_order(name: str, tensor: Tensor) -> Tensor:
    """One of our tensors, with the columns where ours stand."""
    if name == "output_bias":
        return tensor.flatten()
    part = name.removesuffix(".weight").removesuffix(".bias")
    if part.endswith(_WRITERS):
        return tensor[_order(tensor.shape[0])].contiguous()
    if part.endswith(_READERS) and name.endswith(".weight"):
        return tensor[:, _order(tensor.shape[1])].contiguous()
    return tensor


def _order(d_model: int) -> Tensor:
    """A sine, its cosine, the next sine: where each stands with Marian."""
    half = d_model // 2
    return torch.stack((torch.arange(half), half + torch.arange(half)), dim=1).flatten()


def banned_tokens(generation: dict[str, Any], vocab_size: int) -> Iterable[int]:
    """The single tokens that the author forbids, such as padding."""
    words = generation.get("bad_words_ids") or []
    for word in words if isinstance(words, list) else []:
        is_token = isinstance(word, list) and len(word) == 1 and type(word[0]) is int
        if not is_token or not 0 <= word[0] < vocab_size:
            raise UnsupportedError(
                f"the model's bad_words_ids have {word!r}; Quill can ban single tokens only"
            )
        yield word[0]
