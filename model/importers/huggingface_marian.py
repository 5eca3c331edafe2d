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
from quill.model.importers.huggingface_config import layer_norm_config, read_activation, refuse
from quill.model.importers.tensor_layout import Layout, Part, layer_norm, linear
from quill.model.network.config import ModelConfig

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
    refuse(settings, **_USUAL)
    return layer_norm_config(
        settings.integer("d_model"),
        _same_on_both_sides(settings, "attention_heads"),
        family="seq2seq",
        vocab_size=settings.integer("vocab_size"),
        context=settings.integer("max_position_embeddings"),
        num_layers=settings.integer("decoder_layers"),
        num_encoder_layers=settings.integer("encoder_layers"),
        d_ff=_same_on_both_sides(settings, "ffn_dim"),
        positions="sinusoidal",
        norm_placement="post",
        activation=read_activation(settings, "activation_function", "gelu"),
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
        "attention.qkv": ([f"self_attn.{x}_proj" for x in "qkv"], (width, d_model)),
        "attention.out": (["self_attn.out_proj"], (d_model, width)),
        "feed_forward.up": (["fc1"], (d_ff, d_model)),
        "feed_forward.down": (["fc2"], (d_model, d_ff)),
    }
    norms = {"attention": "self_attn_layer_norm", "feed_forward": "final_layer_norm"}
    if has_cross:
        linears |= {
            "cross.query": (["encoder_attn.q_proj"], (width, d_model)),
            "cross.key_value": ([f"encoder_attn.{x}_proj" for x in "kv"], (width, d_model)),
            "cross.out": (["encoder_attn.out_proj"], (d_model, width)),
        }
        norms["cross"] = "encoder_attn_layer_norm"
    layer: Layout = {}
    for name, (sources, shape) in linears.items():
        layer |= linear(name, [f"{theirs}.{each}" for each in sources], shape)
    for name, source in norms.items():
        layer |= layer_norm(f"{name}_residual.norm", f"{theirs}.{source}", d_model)
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
