"""Reads Marian's, BART's and T5's encoder–decoders, as Hugging Face keeps them.

Knows: their settings and tensors, and where Marian's columns stand.
Does not know: files (model/importers/huggingface_weights.py), text.

Marian puts all sines of a position before all cosines, where the paper and Quill let them
alternate. A network doesn't care in which order its columns stand, as long as all its parts
agree, so the columns are put into our order once, at import.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quill.model.checkpoint.tensors import Tensors
from quill.model.checkpoint.typed_values import TypedValues
from quill.model.errors import UnsupportedError
from quill.model.importers.huggingface_config import layer_norm_config, read_activation, refuse
from quill.model.importers.huggingface_weights import same_numbers
from quill.model.importers.tensor_layout import Layout, Part, layer_norm, linear
from quill.model.network.config import Activation, ModelConfig
from quill.model.network.layers import GATED

# What every Marian model on the hub has. Older settings named these; newer code assumes them.
_USUAL = {
    "share_encoder_decoder_embeddings": True,
    "tie_word_embeddings": True,
    "static_position_embeddings": True,
    "normalize_before": False,
    "normalize_embedding": False,
    "add_final_layer_norm": False,
}
_BART = {
    "tie_word_embeddings": True,
    "static_position_embeddings": False,
    "normalize_before": False,
    "normalize_embedding": True,
    "add_final_layer_norm": False,
    "add_bias_logits": False,
    "extra_pos_embeddings": 2,
}
_BART_FIRST_POSITION = 2  # the row of the first token's position
_T5_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gated-gelu": "geglu",
    "gated-silu": "swiglu",
}
_OTHERS_BANNED = ("suppress_tokens", "begin_suppress_tokens", "sequence_bias")
BANNED = -1e4  # the bias of a token that is never generated; float16 can represent it

# Whose inputs, and whose outputs, are the model's columns.
_READERS = ("embedding", "attention.qkv", "cross.query", "cross.key_value", "feed_forward.up")
_WRITERS = ("attention.out", "cross.out", "feed_forward.down", ".norm")


def read_marian_config(settings: TypedValues) -> ModelConfig:
    refuse(settings, **_USUAL)
    return _paper_config(settings, positions="sinusoidal")


def read_bart_config(settings: TypedValues) -> ModelConfig:
    refuse(settings, **_BART)
    return _paper_config(settings, positions="learned", embedding_norm=True)


def _paper_config(settings: TypedValues, **own: Any) -> ModelConfig:
    return layer_norm_config(
        settings.integer("d_model"),
        _same_on_both_sides(settings, "attention_heads"),
        family="seq2seq",
        vocab_size=settings.integer("vocab_size"),
        context=settings.integer("max_position_embeddings"),
        num_layers=settings.integer("decoder_layers"),
        num_encoder_layers=settings.integer("encoder_layers"),
        d_ff=_same_on_both_sides(settings, "ffn_dim"),
        norm_placement="post",
        activation=read_activation(settings, "activation_function", "gelu"),
        output_bias=True,
        scale_embeddings=settings.flag("scale_embedding", False),
        **own,
    )


def read_t5_config(settings: TypedValues) -> ModelConfig:
    """Whether the projection is tied, the tensors tell (`as_saved`)."""
    feed_forward = settings.text("feed_forward_proj", "relu")
    if feed_forward not in _T5_ACTIVATIONS:
        known = ", ".join(_T5_ACTIVATIONS)
        raise UnsupportedError(
            f"the model's feed_forward_proj is {feed_forward!r}; Quill knows {known}"
        )
    num_layers, num_heads = settings.integer("num_layers"), settings.integer("num_heads")
    return ModelConfig(
        family="seq2seq",
        vocab_size=settings.integer("vocab_size"),
        context=settings.integer("n_positions", 512),
        d_model=settings.integer("d_model"),
        num_layers=settings.integer("num_decoder_layers", num_layers),
        num_encoder_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=settings.integer("d_kv"),
        d_ff=settings.integer("d_ff"),
        positions="none",
        norm="rms",
        activation=_T5_ACTIVATIONS[feed_forward],
        norm_eps=settings.number("layer_norm_epsilon", 1e-6),
        attention_scale=1.0,
        relative_buckets=settings.integer("relative_attention_num_buckets", 32),
        relative_distance=settings.integer("relative_attention_max_distance", 128),
    )


def as_saved(config: ModelConfig, source: Tensors) -> ModelConfig:
    """With a projection of its own if T5's tensors have one: settings of all versions say that it
    is the embedding."""
    own, shared = "lm_head.weight", "shared.weight"
    if shared not in source or own not in source or same_numbers(source, own, shared):
        return config
    return replace(config, tied_embeddings=False)


SEQ2SEQ: dict[str, Callable[[TypedValues], ModelConfig]] = {
    "MarianMTModel": read_marian_config,
    "BartForConditionalGeneration": read_bart_config,
    "T5ForConditionalGeneration": read_t5_config,
    "MT5ForConditionalGeneration": read_t5_config,
}


def _same_on_both_sides(settings: TypedValues, name: str) -> int:
    encoder, decoder = (settings.integer(f"{side}_{name}") for side in ("encoder", "decoder"))
    if encoder != decoder:
        raise UnsupportedError(
            f"the model's encoder_{name} is {encoder} and its decoder_{name} is {decoder}; Quill "
            "needs them to be equal"
        )
    return encoder


def seq2seq_layout(config: ModelConfig, settings: TypedValues) -> Layout:
    return _t5_layout(config, settings) if config.relative_buckets else _paper_layout(config)


def _t5_layout(config: ModelConfig, settings: TypedValues) -> Layout:
    vocabulary, d_model = (config.vocab_size, config.d_model), config.d_model
    # Its first version multiplied what it projects; so does the norm before that. mT5 never does.
    scales = settings.flag("scale_decoder_outputs", settings.flag("tie_word_embeddings", True))
    scales = scales and settings.texts("architectures") == ["T5ForConditionalGeneration"]
    layout: Layout = {"embedding.weight": [Part("shared.weight", vocabulary)]}
    if not config.tied_embeddings:
        layout["projection.weight"] = [Part("lm_head.weight", vocabulary)]
    sides = (("encoder", config.num_encoder_layers), ("decoder", config.num_layers))
    for side, num_layers in sides:
        first = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        shape = (config.relative_buckets, config.num_heads)
        times = d_model**-0.5 if side == "decoder" and scales else 1.0
        layout[f"{side}_relative.weight"] = [Part(first, shape)]
        norm = Part(f"{side}.final_layer_norm.weight", (d_model,), times=times)
        layout[f"{side}_norm.weight"] = [norm]
        for index in range(num_layers):
            layer = _t5_layer(config, f"{side}.block.{index}.layer", side == "decoder")
            layout |= {f"{side}.{index}.{name}": parts for name, parts in layer.items()}
    return layout


def _t5_layer(config: ModelConfig, theirs: str, has_cross: bool) -> Layout:
    """BART's by other names, and without biases."""
    last = 2 if has_cross else 1
    norms = {"self_attn": 0, "encoder_attn": 1, "final": last}
    names = {f"{bart}_layer_norm": f"{place}.layer_norm" for bart, place in norms.items()}
    names |= {f"fc{i}": f"{last}.DenseReluDense.w{side}" for i, side in ((1, "i"), (2, "o"))}
    for bart, t5 in (("self_attn", "0.SelfAttention"), ("encoder_attn", "1.EncDecAttention")):
        names |= {f"{bart}.{each}_proj": f"{t5}.{each[0]}" for each in ("q", "k", "v", "out")}

    def renamed(part: Part) -> Part:
        return part._replace(name=f"{theirs}.{names[part.name.removesuffix('.weight')]}.weight")

    barts = {name: parts for name, parts in _layer(config, has_cross).items() if "bias" not in name}
    layer = {name: [renamed(part) for part in parts] for name, parts in barts.items()}
    if config.activation in GATED:
        (up,) = layer["feed_forward.up.weight"]
        ups = [up._replace(name=up.name.replace(".wi.", f".wi_{i}.")) for i in (0, 1)]
        layer["feed_forward.up.weight"] = ups
    return layer


def _paper_layout(config: ModelConfig) -> Layout:
    vocab_size, d_model = config.vocab_size, config.d_model
    layout = {
        "embedding.weight": [Part("model.shared.weight", (vocab_size, d_model))],
        "output_bias": [Part("final_logits_bias", (1, vocab_size))],
    }
    for side, num_layers in (
        ("encoder", config.num_encoder_layers),
        ("decoder", config.num_layers),
    ):
        own = "decoder_" if side == "decoder" else ""
        if config.positions == "learned":
            first, last = _BART_FIRST_POSITION, _BART_FIRST_POSITION + config.context
            name, rows = f"model.{side}.embed_positions.weight", np.arange(first, last)
            layout[f"{own}position_embedding.weight"] = [Part(name, (last, d_model), order=rows)]
        if config.embedding_norm:
            norm = f"model.{side}.layernorm_embedding"
            layout |= layer_norm(f"{own}embedding_norm", norm, d_model)
        for index in range(num_layers):
            theirs = f"model.{side}.layers.{index}"
            for name, parts in _layer(config, has_cross=side == "decoder").items():
                named = [part._replace(name=f"{theirs}.{part.name}") for part in parts]
                layout[f"{side}.{index}.{name}"] = named
    return layout


def _layer(config: ModelConfig, has_cross: bool) -> Layout:
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
        layer |= linear(name, sources, shape)
    for name, source in norms.items():
        layer |= layer_norm(f"{name}_residual.norm", source, d_model)
    return layer


def in_our_order(name: str, tensor: Tensor) -> Tensor:
    """One of Marian's tensors, with the columns where ours stand."""
    return _reordered(name, tensor, _order)


def in_their_order(name: str, tensor: Tensor) -> Tensor:
    """The other way around."""
    if name == "output_bias":
        return tensor.unsqueeze(0)
    return _reordered(name, tensor, lambda d_model: _order(d_model).argsort())


def _reordered(name: str, tensor: Tensor, order: Callable[[int], Tensor]) -> Tensor:
    part = name.removesuffix(".weight").removesuffix(".bias")
    if part.endswith(_WRITERS):
        return tensor[order(tensor.shape[0])].contiguous()
    if part.endswith(_READERS) and name.endswith(".weight"):
        return tensor[:, order(tensor.shape[1])].contiguous()
    return tensor


def _order(d_model: int) -> Tensor:
    """A sine, its cosine, the next sine: where each stands with Marian."""
    half = d_model // 2
    return torch.stack((torch.arange(half), half + torch.arange(half)), dim=1).flatten()


def banned_tokens(generation: dict[str, Any], config: ModelConfig) -> Iterable[int]:
    """The single tokens that the author forbids, such as padding."""
    words, vocab_size = generation.get("bad_words_ids") or [], config.vocab_size
    others = [name for name in _OTHERS_BANNED if generation.get(name)]
    if others or (words and not config.output_bias):
        raise UnsupportedError(
            f"the model's generation_config.json has {(*others, 'bad_words_ids')[0]}; Quill knows "
            "bad_words_ids of networks with a bias of the output, such as Marian. Take it out: "
            "then no token is banned"
        )
    for word in words if isinstance(words, list) else []:
        is_token = isinstance(word, list) and len(word) == 1 and type(word[0]) is int
        if not is_token or not 0 <= word[0] < vocab_size:
            raise UnsupportedError(
                f"the model's bad_words_ids have {word!r}; Quill can ban single tokens only"
            )
        yield word[0]
