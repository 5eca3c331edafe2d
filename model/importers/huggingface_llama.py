"""Reads the shape of Llama, and of what came after it, out of a Hugging Face config.json.

Knows: the settings of each architecture, as transformers 4 and 5 spell them, and their defaults
there. Does not know: files, tensors, tokenizers, mixtures and latent attention
(model/importers/huggingface_decoders.py).
"""

from dataclasses import replace
from typing import Any

from quill.model.checkpoint.typed_values import TypedValues
from quill.model.errors import ConfigError, UnsupportedError
from quill.model.importers.huggingface_config import (
    FULL,
    layer_windows,
    one_window,
    read_activation,
    refuse,
    rotary_by_kind,
    rotary_scaling,
    rotary_settings,
)
from quill.model.network.config import ModelConfig


def read_llama(settings: TypedValues) -> ModelConfig:
    refuse(settings, layer_types=[FULL], use_sliding_window=False)
    attention_bias = settings.flag("attention_bias", False)
    return decoder_config(
        settings,
        qkv_bias=attention_bias,
        attention_out_bias=attention_bias,
        ff_bias=settings.flag("mlp_bias", False),
    )


def read_mistral(settings: TypedValues) -> ModelConfig:
    # An absent setting and a null differ here: absent, the window is 4,096 tokens.
    window = settings.integer("sliding_window", 0) if "sliding_window" in settings.names else 4096
    return decoder_config(settings, default_kv_heads=8, **one_window(settings, window))


def read_qwen2(settings: TypedValues) -> ModelConfig:
    return decoder_config(settings, qkv_bias=True, **qwen_windows(settings))


def read_qwen3(settings: TypedValues, default_head_size: int = 128, **own: Any) -> ModelConfig:
    bias = settings.flag("attention_bias", False)
    return decoder_config(
        settings,
        head_size=settings.integer("head_dim", default_head_size),
        qkv_bias=bias,
        attention_out_bias=bias,
        qk_norm="head",
        **qwen_windows(settings),
        **own,
    )


def read_olmo2(settings: TypedValues, **own: Any) -> ModelConfig:
    bias = settings.flag("attention_bias", False)
    return decoder_config(
        settings,
        default_eps=1e-5,
        qkv_bias=bias,
        attention_out_bias=bias,
        norm_placement="output",
        qk_norm="width",
        **own,
    )


def read_phi3(settings: TypedValues) -> ModelConfig:
    """The original context beside the rotary settings counts before the one in them."""
    window = settings.integer("sliding_window", 0)
    rotary, name = rotary_settings(settings), "original_max_position_embeddings"
    original = settings.integer(name, rotary.integer(name, 4096))
    values = {each: rotary.get(each) for each in rotary.names} | {name: original}
    return decoder_config(
        settings,
        default_eps=1e-5,
        rotary=TypedValues(values, "the model's rotary settings"),
        **one_window(settings, window),
    )


def read_gemma1(settings: TypedValues) -> ModelConfig:
    # The first releases have 'gelu', and mean its approximation.
    activation = settings.text("hidden_activation", settings.text("hidden_act", "gelu"))
    if activation not in ("gelu", "gelu_pytorch_tanh"):
        raise UnsupportedError(f"the model's hidden_act is {activation!r}; Quill knows 'gelu'")
    refuse(settings, use_bidirectional_attention=False)
    bias = settings.flag("attention_bias", False)
    return decoder_config(
        settings,
        head_size=settings.integer("head_dim", 256),
        activation="geglu",
        scale_embeddings=True,
        qkv_bias=bias,
        attention_out_bias=bias,
        tied_embeddings=settings.flag("tie_word_embeddings", True),
    )


def read_granite(settings: TypedValues) -> ModelConfig:
    """Its logits_scaling is in the last norm (model/importers/huggingface_directory.py)."""
    if not settings.number("logits_scaling", 1.0) > 0:
        raise ConfigError("the model's logits_scaling isn't positive")
    return replace(
        read_llama(settings),
        attention_scale=settings.number("attention_multiplier", 1.0),
        embedding_scale=settings.number("embedding_multiplier", 1.0),
        residual_scale=settings.number("residual_multiplier", 1.0),
    )


def read_smollm3(settings: TypedValues) -> ModelConfig:
    refuse(settings, use_sliding_window=False, layer_types=[FULL])
    pattern = settings.integer("no_rope_layer_interval", 4)
    if settings.get("no_rope_layers") is not None:
        rotary = settings.integers("no_rope_layers")
        num_layers = settings.integer("num_hidden_layers")
        pattern = rotary.index(0) + 1 if 0 in rotary else 0
        expected = [int(not pattern or (i + 1) % pattern != 0) for i in range(num_layers)]
        if rotary != expected:
            raise UnsupportedError(
                f"the model's no_rope_layers are {rotary}; Quill knows every so many-th only"
            )
    bias = settings.flag("attention_bias", False)
    return decoder_config(
        settings,
        default_kv_heads=4,
        default_base=2e6,
        qkv_bias=bias,
        attention_out_bias=bias,
        ff_bias=settings.flag("mlp_bias", False),
        tied_embeddings=settings.flag("tie_word_embeddings", True),
        nope_pattern=pattern,
    )


def read_olmo3(settings: TypedValues) -> ModelConfig:
    """Layers with a window have the base of the others, and nothing stretches their positions."""
    of_full, of_local = rotary_by_kind(settings)
    if of_local.text("rope_type", "default") != "default":
        raise UnsupportedError("the model stretches the positions of layers with a window")
    base = settings.number("rope_theta", 500_000.0)
    windows = layer_windows(settings, settings.integer("sliding_window", 4096), 4)
    if windows:
        windows["local_rotary_base"] = of_local.number("rope_theta", base)
    return read_olmo2(settings, rotary=of_full, default_base=base, **windows)


def read_stablelm(settings: TypedValues) -> ModelConfig:
    refuse(settings, qk_layernorm=False, use_parallel_residual=False)
    return decoder_config(
        settings,
        default_part=0.25,
        norm="layer",
        norm_eps=settings.number("layer_norm_eps", 1e-5),
        qkv_bias=settings.flag("use_qkv_bias", False),
    )


def read_phi(settings: TypedValues) -> ModelConfig:
    refuse(settings, qk_layernorm=False, tie_word_embeddings=False)
    return decoder_config(
        settings,
        default_part=0.5,
        activation=read_activation(settings, "hidden_act", "gelu_new"),
        output_bias=True,
        parallel_residual=True,
        **_biased(settings),
    )


def read_gpt_neox(settings: TypedValues) -> ModelConfig:
    refuse(settings, attention_bias=True)
    return decoder_config(
        settings,
        default_base=settings.number("rotary_emb_base", 10_000.0),
        default_part=settings.number("rotary_pct", 0.25),
        num_kv_heads=settings.integer("num_attention_heads"),
        activation=read_activation(settings, "hidden_act", "gelu"),
        parallel_residual=settings.flag("use_parallel_residual", True),
        **_biased(settings),
    )


def _biased(settings: TypedValues) -> dict[str, Any]:
    return {
        "norm": "layer",
        "norm_eps": settings.number("layer_norm_eps", 1e-5),
        "qkv_bias": True,
        "attention_out_bias": True,
        "ff_bias": True,
    }


def read_gemma2(settings: TypedValues) -> ModelConfig:
    return _gemma(
        settings,
        default_pattern=2,
        attention_soft_cap=_cap(settings, "attn_logit_softcapping", 50.0),
        logit_soft_cap=_cap(settings, "final_logit_softcapping", 30.0),
    )


def read_gemma3(settings: TypedValues) -> ModelConfig:
    refuse(settings, attn_logit_softcapping=None)  # transformers has it, and doesn't use it
    of_full, of_local = rotary_by_kind(settings)
    if of_local.text("rope_type", "default") != "default":
        raise UnsupportedError("the model stretches the positions of layers with a window")
    base = of_local.number("rope_theta", settings.number("rope_local_base_freq", 10_000.0))
    return _gemma(
        settings,
        default_pattern=settings.integer("sliding_window_pattern", 6),
        default_base=1e6,
        qk_norm="head",
        rotary=of_full,
        local_rotary_base=base,
        logit_soft_cap=settings.number("final_logit_softcapping", 0.0),
    )


def _gemma(settings: TypedValues, default_pattern: int, **own: Any) -> ModelConfig:
    refuse(settings, use_bidirectional_attention=False)
    activation = settings.text("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise UnsupportedError(
            f"the model's hidden_activation is {activation!r}; Quill knows 'gelu_pytorch_tanh'"
        )
    scalar = settings.number("query_pre_attn_scalar", 256)
    for name, value in {
        "query_pre_attn_scalar": scalar,
        "sliding_window_pattern": default_pattern,
    }.items():
        if not value > 0:
            raise ConfigError(f"{name} is {value}; it must be a positive number")
    bias = settings.flag("attention_bias", False)
    windows = layer_windows(settings, settings.integer("sliding_window", 4096), default_pattern)
    if not windows:
        own.pop("local_rotary_base", None)
    return decoder_config(
        settings,
        head_size=settings.integer("head_dim", 256),
        activation="geglu",
        norm_placement="sandwich",
        scale_embeddings=True,
        qkv_bias=bias,
        attention_out_bias=bias,
        tied_embeddings=settings.flag("tie_word_embeddings", True),
        attention_scale=scalar**-0.5,
        **windows,
        **own,
    )


def _cap(settings: TypedValues, name: str, default: float) -> float:
    """An absent setting and a null differ here: a null is no cap."""
    return settings.number(name, 0.0 if name in settings.names else default)


def decoder_config(
    settings: TypedValues,
    *,
    default_kv_heads: int | None = None,
    default_eps: float = 1e-6,
    default_base: float = 10_000.0,
    default_part: float = 1.0,
    rotary: TypedValues | None = None,
    **own: Any,
) -> ModelConfig:
    """Llama's settings, and those that an architecture adds or replaces."""
    refuse(settings, is_causal=True)
    activation = settings.text("hidden_act", "silu")
    if "activation" not in own and activation not in ("silu", "swish"):
        raise UnsupportedError(f"the model's hidden_act is {activation!r}; Quill knows 'silu'")
    d_model, num_heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    rotary = rotary or rotary_settings(settings)
    context = settings.integer("max_position_embeddings")
    head_size = settings.integer("head_dim", d_model // max(num_heads, 1))
    part = rotary.number(
        "partial_rotary_factor", settings.number("partial_rotary_factor", default_part)
    )
    values: dict[str, Any] = {
        "vocab_size": settings.integer("vocab_size"),
        "context": context,
        "d_model": d_model,
        "num_layers": settings.integer("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": settings.integer("num_key_value_heads", default_kv_heads or num_heads),
        "head_size": head_size,
        "d_ff": settings.integer("intermediate_size"),
        "activation": "swiglu",
        "tied_embeddings": settings.flag("tie_word_embeddings", False),
        "norm_eps": settings.number("rms_norm_eps", default_eps),
        "rotary_base": rotary.number("rope_theta", settings.number("rope_theta", default_base)),
        "rotary_scaling": rotary_scaling(rotary, context),
        "partial_rotary_size": 0 if part == 1.0 else int(head_size * part),
        "norm": "rms",
    }
    return ModelConfig(family="causal", positions="rotary", **(values | own))


def qwen_windows(settings: TypedValues) -> dict[str, Any]:
    if not settings.flag("use_sliding_window", False):
        return layer_windows(settings, 0, FULL)
    if not isinstance(settings.get("layer_types"), list):
        raise UnsupportedError("the model has use_sliding_window without layer_types")
    return layer_windows(settings, settings.integer("sliding_window", 4096), FULL)
