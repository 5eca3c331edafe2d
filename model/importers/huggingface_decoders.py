"""Which decoders a Hugging Face directory can hold: their settings, and the names of their tensors.

Knows: mixtures of experts and latent attention; the others' settings are in
model/importers/huggingface_llama.py. Does not know: files, tokenizers.
"""

from collections.abc import Callable
from typing import Any

from quill.model.checkpoint.typed_values import TypedValues
from quill.model.errors import UnsupportedError
from quill.model.importers.huggingface_config import (
    CONV,
    conv_layers,
    layer_windows,
    one_window,
    refuse,
    rotary_settings,
    yarn_scale,
)
from quill.model.importers.huggingface_llama import (
    decoder_config,
    qwen_windows,
    read_gemma1,
    read_gemma2,
    read_gemma3,
    read_gpt_neox,
    read_granite,
    read_llama,
    read_mistral,
    read_olmo2,
    read_olmo3,
    read_phi,
    read_phi3,
    read_qwen2,
    read_qwen3,
    read_smollm3,
    read_stablelm,
)
from quill.model.importers.tensor_layout import LlamaNames
from quill.model.network.config import Experts, Latent, ModelConfig, ShortConv

LLAMA_NAMES = LlamaNames(
    embedding="model.embed_tokens",
    final_norm="model.norm",
    projection="lm_head",
    layer="model.layers.{}",
    attention_norm="input_layernorm",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    attention_out="self_attn.o_proj",
    feed_forward_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)

_NAMES = {
    "Olmo2ForCausalLM": LLAMA_NAMES._replace(
        attention_norm="post_attention_layernorm", feed_forward_norm="post_feedforward_layernorm"
    ),
    "Phi3ForCausalLM": LLAMA_NAMES._replace(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
    "MixtralForCausalLM": LLAMA_NAMES._replace(
        router="block_sparse_moe.gate",
        expert="block_sparse_moe.experts.{}",
        expert_parts=("w1", "w3", "w2"),
    ),
}
_NAMES |= {
    "Olmo3ForCausalLM": _NAMES["Olmo2ForCausalLM"],
    "GemmaForCausalLM": LLAMA_NAMES._replace(norm_plus=1.0),
    "Qwen2MoeForCausalLM": LLAMA_NAMES._replace(
        router="mlp.gate",
        expert="mlp.experts.{}",
        shared_experts="mlp.shared_expert",
        shared_gate="mlp.shared_expert_gate",
    ),
    "PhiForCausalLM": LLAMA_NAMES._replace(
        final_norm="model.final_layernorm",
        attention_out="self_attn.dense",
        feed_forward_norm="input_layernorm",
        up="mlp.fc1",
        down="mlp.fc2",
    ),
    "GPTNeoXForCausalLM": LLAMA_NAMES._replace(
        embedding="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        projection="embed_out",
        layer="gpt_neox.layers.{}",
        qkv="attention.query_key_value",
        qkv_by_head=True,
        attention_out="attention.dense",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
    ),
}
_NAMES["GptOssForCausalLM"] = LLAMA_NAMES._replace(
    router="mlp.router",
    fused_experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    experts_transposed=True,
)
_NAMES["Lfm2ForCausalLM"] = LLAMA_NAMES._replace(
    final_norm="model.embedding_norm",
    attention_norm="operator_norm",
    attention_out="self_attn.out_proj",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    conv="conv.conv",
    conv_in="conv.in_proj",
    conv_out="conv.out_proj",
    conv_nested=True,
    feed_forward_norm="ffn_norm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
)
_NAMES |= dict.fromkeys(
    ("Gemma2ForCausalLM", "Gemma3ForCausalLM"),
    LLAMA_NAMES._replace(
        attention_after="post_attention_layernorm",
        feed_forward_norm="pre_feedforward_layernorm",
        feed_forward_after="post_feedforward_layernorm",
        norm_plus=1.0,
    ),
)
_NAMES |= dict.fromkeys(
    ("Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    LLAMA_NAMES._replace(
        router="mlp.gate",
        balance="mlp.gate.e_score_correction_bias",
        expert="mlp.experts.{}",
        shared_experts="mlp.shared_experts",
    ),
)


def decoder_names(architecture: str, settings: TypedValues) -> LlamaNames:
    names = _NAMES.get(architecture, LLAMA_NAMES)
    if architecture == "GraniteForCausalLM":
        return names._replace(logit_scale=1 / settings.number("logits_scaling", 1.0))
    if settings.get("quantization_config") is not None:  # MXFP4's blocks are along the inputs
        return names._replace(experts_transposed=False)
    return names


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
    return read_qwen3(settings, head_size, experts=experts)


def _qwen2_moe(settings: TypedValues) -> ModelConfig:
    refuse(settings, decoder_sparse_step=1, mlp_only_layers=[])
    d_expert = settings.integer("moe_intermediate_size", 1408)
    d_shared = settings.integer("shared_expert_intermediate_size", 5632)
    if d_expert < 1 or d_shared % d_expert:
        raise UnsupportedError(
            f"the model's shared_expert_intermediate_size is {d_shared}; Quill needs a multiple of "
            f"moe_intermediate_size, {d_expert}"
        )
    experts = Experts(
        number=settings.integer("num_experts", 60),
        per_token=settings.integer("num_experts_per_tok", 4),
        d_expert=d_expert,
        num_shared=d_shared // d_expert,
        shared_gate=True,
        normalize=settings.flag("norm_topk_prob", False),
    )
    bias = settings.flag("qkv_bias", True)
    return decoder_config(settings, qkv_bias=bias, experts=experts, **qwen_windows(settings))


def _mixtral(settings: TypedValues) -> ModelConfig:
    experts = Experts(
        number=settings.integer("num_local_experts", 8),
        per_token=settings.integer("num_experts_per_tok", 2),
        d_expert=settings.integer("intermediate_size"),
    )
    window = settings.integer("sliding_window", 0)
    return decoder_config(
        settings,
        default_kv_heads=8,
        default_eps=1e-5,
        default_base=1e6,
        experts=experts,
        **one_window(settings, window),
    )


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
    return decoder_config(
        settings,
        num_kv_heads=num_heads,  # no grouping, whatever the config has
        head_size=latent.nope_size + latent.rope_size,
        attention_scale=_deepseek_scale(settings, latent),
        latent=latent,
        experts=Experts(
            per_token=settings.integer("num_experts_per_tok", 8),
            d_expert=settings.integer("moe_intermediate_size"),
            **experts,
        ),
    )


def _deepseek_scale(settings: TypedValues, latent: Latent) -> float | None:
    """Of scores, where YaRN raises it."""
    rotary = rotary_settings(settings)
    of_all = rotary.number("mscale_all_dim", 0.0)
    if not of_all:
        return None
    scale = yarn_scale(rotary.number("factor", 1.0), of_all)
    return float((latent.nope_size + latent.rope_size) ** -0.5 * scale * scale)


GPT_OSS_ROTARY: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def _gpt_oss(settings: TypedValues) -> ModelConfig:
    rotary = rotary_settings(settings)
    experts = Experts(
        number=settings.integer("num_local_experts", 128),
        per_token=settings.integer("num_experts_per_tok", 4),
        d_expert=settings.integer("intermediate_size"),
        bias=True,
        clamp=settings.number("swiglu_limit", 7.0),
        slope=settings.number("swiglu_alpha", 1.702),
    )
    if not experts.clamp:
        raise UnsupportedError("the model's swiglu_limit is 0; Quill needs a positive one")
    bias = settings.flag("attention_bias", True)
    window = settings.integer("sliding_window", 0 if "sliding_window" in settings.names else 128)
    return decoder_config(
        settings,
        default_eps=1e-5,
        default_base=150_000.0,
        rotary=rotary if rotary.names else TypedValues(GPT_OSS_ROTARY, "gpt-oss's own"),
        head_size=settings.integer("head_dim", 64),
        qkv_bias=bias,
        attention_out_bias=bias,
        attention_sinks=True,
        experts=experts,
        **layer_windows(settings, window, 2),
    )


def _lfm2(settings: TypedValues) -> ModelConfig:
    layers = tuple(index for index, kind in enumerate(conv_layers(settings)) if kind == CONV)
    conv = None
    if layers:
        taps, bias = settings.integer("conv_L_cache", 3), settings.flag("conv_bias", False)
        conv = ShortConv(taps=taps, layers=layers, bias=bias)
    tied = settings.flag("tie_word_embeddings", True)
    return decoder_config(
        settings,
        default_base=1e6,
        default_kv_heads=8,
        norm_eps=settings.number("norm_eps", 1e-5),
        d_ff=_lfm2_width(settings),
        qk_norm="head",
        tied_embeddings=settings.flag("tie_embedding", tied),
        short_conv=conv,
    )


def _lfm2_width(settings: TypedValues) -> int:
    """Of the feed-forward: two thirds of the setting, rounded up, unless that is switched off."""
    width = settings.integer("block_ff_dim", settings.integer("intermediate_size", 12288))
    if not settings.flag("block_auto_adjust_ff_dim", True):
        return width
    multiple = settings.integer("block_multiple_of", 256)
    if multiple < 1:
        raise UnsupportedError(f"the model's block_multiple_of is {multiple}; it must be positive")
    width = int(settings.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
    return -(-width // multiple) * multiple


DECODERS: dict[str, Callable[[TypedValues], ModelConfig]] = {
    "LlamaForCausalLM": read_llama,
    "MistralForCausalLM": read_mistral,
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen3ForCausalLM": read_qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Olmo2ForCausalLM": read_olmo2,
    "Olmo3ForCausalLM": read_olmo3,
    "SmolLM3ForCausalLM": read_smollm3,
    "GraniteForCausalLM": read_granite,
    "StableLmForCausalLM": read_stablelm,
    "PhiForCausalLM": read_phi,
    "GPTNeoXForCausalLM": read_gpt_neox,
    "GemmaForCausalLM": read_gemma1,
    "Phi3ForCausalLM": read_phi3,
    "Gemma2ForCausalLM": read_gemma2,
    "Gemma3ForCausalLM": read_gemma3,
    "DeepseekV2ForCausalLM": _deepseek_v2,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "GptOssForCausalLM": _gpt_oss,
    "Lfm2ForCausalLM": _lfm2,
}
