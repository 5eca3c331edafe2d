"""Reads the shape of Llama, and of what came after it, out of a Hugging Face config.json.

Knows: the settings of each architecture, as transformers 4 and 5 spell them, and their defaults
there. Does not know: files, tensors, tokenizers.
"""

from collections.abc import Callable
from typing import Any

from quill.model.checkpoint.typed_values import TypedValues
from quill.model.errors import CheckpointError, ConfigError, UnsupportedError
from quill.model.importers.huggingface_config import refuse
from quill.model.network.config import Experts, Latent, ModelConfig, RotaryScaling

SLIDING, FULL = "sliding_attention", "full_attention"


def _llama(settings: TypedValues) -> ModelConfig:
    refuse(settings, layer_types=[FULL], use_sliding_window=False)
    attention_bias = settings.flag("attention_bias", False)
    return _family(
        settings,
        qkv_bias=attention_bias,
        attention_out_bias=attention_bias,
        ff_bias=settings.flag("mlp_bias", False),
    )


def _mistral(settings: TypedValues) -> ModelConfig:
    # An absent setting and a null differ here: absent, the window is 4,096 tokens.
    window = settings.integer("sliding_window", 0) if "sliding_window" in settings.names else 4096
    return _family(settings, default_kv_heads=8, **_one_window(settings, window))


def _qwen2(settings: TypedValues) -> ModelConfig:
    return _family(settings, qkv_bias=True, **_qwen_windows(settings))


def _qwen3(settings: TypedValues, default_head_size: int = 128, **own: Any) -> ModelConfig:
    bias = settings.flag("attention_bias", False)
    return _family(
        settings,
        head_size=settings.integer("head_dim", default_head_size),
        qkv_bias=bias,
        attention_out_bias=bias,
        qk_norm="head",
        **_qwen_windows(settings),
        **own,
    )


def _qwen3_moe(settings: TypedValues) -> ModelConfig:
    refuse(settings, decoder_sparse_step=1)
    plain = settings.integers("mlp_only_layers") if settings.get("mlp_only_layers") else []
    if sorted(plain) != list(range(len(plain))):
        raise UnsupportedError(
            f"the model's mlp_only_layers are {plain}; Quill has plain layers only before others"
        )
    experts = Experts(
        number=settings.integer("num_experts", settings.integer("num_local_experts", 128)),
        per_token=settings.integer("num_experts_per_tok", 8),
        d_expert=settings.integer("moe_intermediate_size", 768),
        normalize=settings.flag("norm_topk_prob", False),
        dense_layers=len(plain),
    )
    head_size = settings.integer("hidden_size") // settings.integer("num_attention_heads")
    return _qwen3(settings, head_size, experts=experts)


def _mixtral(settings: TypedValues) -> ModelConfig:
    experts = Experts(
        number=settings.integer("num_local_experts", 8),
        per_token=settings.integer("num_experts_per_tok", 2),
        d_expert=settings.integer("intermediate_size"),
    )
    window = settings.integer("sliding_window", 0)
    return _family(
        settings,
        default_kv_heads=8,
        default_eps=1e-5,
        default_base=1e6,
        experts=experts,
        **_one_window(settings, window),
    )


def _olmo2(settings: TypedValues) -> ModelConfig:
    bias = settings.flag("attention_bias", False)
    return _family(
        settings,
        default_eps=1e-5,
        qkv_bias=bias,
        attention_out_bias=bias,
        norm_placement="output",
        qk_norm="width",
    )


def _phi3(settings: TypedValues) -> ModelConfig:
    refuse(settings, partial_rotary_factor=1.0)
    window = settings.integer("sliding_window", 0)
    return _family(settings, default_eps=1e-5, **_one_window(settings, window))


def _gemma2(settings: TypedValues) -> ModelConfig:
    return _gemma(
        settings,
        default_pattern=2,
        attention_soft_cap=_cap(settings, "attn_logit_softcapping", 50.0),
        logit_soft_cap=_cap(settings, "final_logit_softcapping", 30.0),
    )


def _gemma3(settings: TypedValues) -> ModelConfig:
    refuse(settings, attn_logit_softcapping=None)  # transformers has it, and doesn't use it
    of_full, of_local = _rotary_by_kind(settings)
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
    windows = _windows(settings, settings.integer("sliding_window", 4096), default_pattern)
    if not windows:
        own.pop("local_rotary_base", None)
    return _family(
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


def _deepseek_v2(settings: TypedValues) -> ModelConfig:
    # transformers has the setting, and doesn't use it.
    refuse(settings, norm_topk_prob=False, mlp_bias=False)
    method = settings.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedError(
            f"the model's topk_method is {method!r}; Quill knows 'greedy' and "
            "'group_limited_greedy'"
        )
    in_groups = method == "group_limited_greedy"
    return _deepseek(
        settings,
        number=settings.integer("n_routed_experts", 64),
        dense_layers=settings.integer("first_k_dense_replace", 0),
        num_shared=settings.integer("n_shared_experts", 2),
        scale=settings.number("routed_scaling_factor", 1.0),
        groups=settings.integer("n_group") if in_groups else 1,
        top_groups=settings.integer("topk_group") if in_groups else 1,
        normalize=False,
    )


def _deepseek_v3(settings: TypedValues) -> ModelConfig:
    refuse(settings, topk_method="noaux_tc", scoring_func="sigmoid", rope_interleave=True)
    groups, number = settings.integer("n_group", 8), settings.integer("n_routed_experts", 256)
    return _deepseek(
        settings,
        number=number,
        dense_layers=settings.integer("first_k_dense_replace", 3),
        num_shared=settings.integer("n_shared_experts", 1),
        scale=settings.number("routed_scaling_factor", 2.5),
        groups=groups,
        top_groups=settings.integer("topk_group", 4),
        group_best=2,
        normalize=settings.flag("norm_topk_prob", True),
        scoring="sigmoid",
        balanced=True,
    )


def _deepseek(settings: TypedValues, **experts: Any) -> ModelConfig:
    refuse(settings, attention_bias=False)
    latent = Latent(
        rank=settings.integer("kv_lora_rank", 512),
        query_rank=settings.integer("q_lora_rank", 0 if "q_lora_rank" in settings.names else 1536),
        rope_size=settings.integer("qk_rope_head_dim", 64),
        nope_size=settings.integer("qk_nope_head_dim", 128),
        value_size=settings.integer("v_head_dim", 128),
    )
    num_heads = settings.integer("num_attention_heads")
    return _family(
        settings,
        num_kv_heads=num_heads,  # no grouping, whatever the config has
        head_size=latent.nope_size + latent.rope_size,
        latent=latent,
        experts=Experts(
            per_token=settings.integer("num_experts_per_tok", 8),
            d_expert=settings.integer("moe_intermediate_size"),
            **experts,
        ),
    )


def _family(
    settings: TypedValues,
    *,
    default_kv_heads: int | None = None,
    default_eps: float = 1e-6,
    default_base: float = 10_000.0,
    rotary: TypedValues | None = None,
    **own: Any,
) -> ModelConfig:
    """Llama's settings, and those that an architecture adds or replaces."""
    activation = settings.text("hidden_act", "silu")
    if "activation" not in own and activation not in ("silu", "swish"):
        raise UnsupportedError(f"the model's hidden_act is {activation!r}; Quill knows 'silu'")
    d_model, num_heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    rotary, context = rotary or _rotary(settings), settings.integer("max_position_embeddings")
    values: dict[str, Any] = {
        "vocab_size": settings.integer("vocab_size"),
        "context": context,
        "d_model": d_model,
        "num_layers": settings.integer("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": settings.integer("num_key_value_heads", default_kv_heads or num_heads),
        "head_size": settings.integer("head_dim", d_model // max(num_heads, 1)),
        "d_ff": settings.integer("intermediate_size"),
        "activation": "swiglu",
        "tied_embeddings": settings.flag("tie_word_embeddings", False),
        "norm_eps": settings.number("rms_norm_eps", default_eps),
        "rotary_base": rotary.number("rope_theta", settings.number("rope_theta", default_base)),
        "rotary_scaling": _rotary_scaling(rotary, context),
    }
    return ModelConfig(family="causal", positions="rotary", norm="rms", **(values | own))


def _qwen_windows(settings: TypedValues) -> dict[str, Any]:
    if not settings.flag("use_sliding_window", False):
        return _windows(settings, 0, FULL)
    if not isinstance(settings.get("layer_types"), list):
        raise UnsupportedError("the model has use_sliding_window without layer_types")
    return _windows(settings, settings.integer("sliding_window", 4096), FULL)


def _one_window(settings: TypedValues, window: int) -> dict[str, Any]:
    """The same in all layers. Layers of other types are refused: transformers overlooks them."""
    if window:
        refuse(settings, layer_types=[SLIDING])
    return _windows(settings, window, SLIDING)


def _windows(settings: TypedValues, window: int, default: str | int) -> dict[str, Any]:
    """Which layers see a window only. `default`: what all are, or every how many-th sees all."""
    num_layers = settings.integer("num_hidden_layers")
    if settings.get("layer_types") is not None:
        kinds = settings.texts("layer_types")
    elif isinstance(default, int):
        kinds = [FULL if (i + 1) % default == 0 else SLIDING for i in range(num_layers)]
    else:
        kinds = [default] * num_layers
    if len(kinds) != num_layers:
        raise CheckpointError(f"the model has {len(kinds)} layer_types for {num_layers} layers")
    if unknown := set(kinds) - {SLIDING, FULL}:
        raise UnsupportedError(f"the model has layers of {', '.join(sorted(unknown))}")
    if window == 0 or SLIDING not in kinds:
        return {}
    pattern = kinds.index(FULL) + 1 if FULL in kinds else 0
    if any((kind == FULL) != (pattern and (i + 1) % pattern == 0) for i, kind in enumerate(kinds)):
        raise UnsupportedError(
            f"the model's layer_types are {kinds}; Quill knows windows in all layers, or in all "
            "but every so many-th"
        )
    # As long as the context, and the same in all layers: then it leaves nothing out.
    if not pattern and window >= settings.integer("max_position_embeddings"):
        return {}
    return {"window": window, "window_pattern": pattern}


def _rotary(settings: TypedValues) -> TypedValues:
    """`rope_parameters` in transformers 5, `rope_scaling` in 4: there it wins if both are there."""
    name = "rope_scaling" if _object(settings, "rope_scaling") else "rope_parameters"
    values = _object(settings, name)
    if {SLIDING, FULL} & set(values):
        raise UnsupportedError(
            f"the model has {name} for each kind of layer; Quill knows that of Gemma 3 only"
        )
    return TypedValues(values, f"{name} in the config.json")


def _rotary_by_kind(settings: TypedValues) -> tuple[TypedValues, TypedValues]:
    """Gemma 3's, of layers that see all and of layers with a window. `rope_scaling` is added to
    the former's."""
    name = "rope_parameters"
    by_kind = TypedValues(_object(settings, name), name)
    if others := sorted(set(by_kind.names) - {SLIDING, FULL}):
        raise UnsupportedError(
            f"the model's {name} have {others[0]}; Quill knows {SLIDING} and {FULL} in Gemma 3's"
        )
    full = _object(by_kind, FULL) | _object(settings, "rope_scaling")
    return TypedValues(full, f"{name} of {FULL}"), TypedValues(_object(by_kind, SLIDING), name)


def _object(settings: TypedValues, name: str) -> dict[str, Any]:
    return {} if settings.get(name) is None else settings.mapping(name)


def _rotary_scaling(rotary: TypedValues, context: int) -> RotaryScaling | None:
    kind = rotary.text("rope_type", rotary.text("type", "default"))
    if rotary.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedError(
            "the model sets partial_rotary_factor; Quill applies RoPE to whole heads"
        )
    if kind == "default":
        return None
    if kind == "linear":
        return RotaryScaling(kind="linear", factor=rotary.number("factor"))
    if kind == "llama3":
        return RotaryScaling(
            kind="llama3",
            factor=rotary.number("factor"),
            low_freq_factor=rotary.number("low_freq_factor"),
            high_freq_factor=rotary.number("high_freq_factor"),
            original_context=rotary.integer("original_max_position_embeddings", context),
        )
    raise UnsupportedError(
        f"the model stretches rotary positions by {kind!r}; Quill knows 'linear' and 'llama3'"
    )


LLAMA_FAMILY: dict[str, Callable[[TypedValues], ModelConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
    "Olmo2ForCausalLM": _olmo2,
    "Phi3ForCausalLM": _phi3,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "DeepseekV2ForCausalLM": _deepseek_v2,
    "DeepseekV3ForCausalLM": _deepseek_v3,
}
