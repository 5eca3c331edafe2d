"""Small models of architectures after Llama, by transformers, with random weights.

Their sizes are such that Quill can export them in every precision.
"""

from collections.abc import Callable
from typing import Any

import transformers

from tests.model.huggingface_models import randomised

CONTEXT = 96
SIZES: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}
PART: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 24,
    "beta_fast": 4.0,
}


def made(name: str, **settings: Any) -> Any:
    config = getattr(transformers, f"{name}{'Text' if name == 'Gemma3' else ''}Config")(
        **(SIZES | settings)
    )
    config._attn_implementation = "eager"  # PyTorch's own knows no soft cap
    model = randomised(getattr(transformers, f"{name}ForCausalLM")(config))
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.copy_((buffer + 1).cumsum(0) * 0.01)
    return model


# A clamp and sinks that change numbers as large as these models have.
GPT_OSS: dict[str, Any] = {
    "head_dim": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 20,
    "swiglu_limit": 0.6,
    "rope_parameters": YARN | {"rope_theta": 1e4, "truncate": False},
}

LFM2: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "block_multiple_of": 32,
    "tie_word_embeddings": True,
}

SUCCESSORS: dict[str, Callable[[], Any]] = {
    "mistral with a window": lambda: made("Mistral", sliding_window=20, head_dim=16),
    "qwen3": lambda: made("Qwen3", head_dim=32),
    "olmo-2": lambda: made("Olmo2"),
    "phi-3": lambda: made("Phi3", sliding_window=33),
    "gemma 2": lambda: made("Gemma2", head_dim=32, sliding_window=20, query_pre_attn_scalar=24),
    "gemma 3": lambda: made(
        "Gemma3",
        head_dim=32,
        sliding_window=20,
        sliding_window_pattern=2,
        query_pre_attn_scalar=24,
        final_logit_softcapping=3.0,
        tie_word_embeddings=True,
    ),
    "mixtral": lambda: made("Mixtral", num_local_experts=5, num_experts_per_tok=2),
    "qwen3-moe": lambda: made(
        "Qwen3Moe",
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=64,
        mlp_only_layers=[0],
    ),
    "gemma": lambda: made("Gemma", head_dim=32, tie_word_embeddings=True),
    "granite": lambda: made(
        "Granite",
        attention_multiplier=0.2,
        embedding_multiplier=3.0,
        residual_multiplier=0.7,
        logits_scaling=2.5,
        tie_word_embeddings=True,
    ),
    "smollm3": lambda: made("SmolLM3", num_hidden_layers=3, no_rope_layer_interval=2),
    "olmo-3 with yarn": lambda: made(
        "Olmo3",
        sliding_window=20,
        num_hidden_layers=4,
        rope_parameters={
            "full_attention": YARN | {"rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "qwen2-moe": lambda: made(
        "Qwen2Moe",
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    ),
    "stablelm": lambda: made("StableLm", use_qkv_bias=True, rope_parameters=PART | {}),
    "phi": lambda: made("Phi", rope_parameters=PART | {}),
    "gpt-neox": lambda: made("GPTNeoX", num_key_value_heads=4, rope_parameters=PART | {}),
    "gpt-neox, one after another": lambda: made(
        "GPTNeoX", use_parallel_residual=False, rope_parameters=PART | {}
    ),
    "phi-3 with longrope": lambda: made(
        "Phi3",
        rope_parameters=PART
        | {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 3.0, 5.0],
            # So that transformers has the long ones for all texts, as Quill has.
            "original_max_position_embeddings": 1,
            "attention_factor": 1.2,
        },
        original_max_position_embeddings=1,
    ),
    "deepseek-v3 with yarn": lambda: made(
        "DeepseekV3",
        **LATENT,
        q_lora_rank=32,
        n_group=2,
        topk_group=1,
        num_mtp_layers=0,
        rope_parameters=YARN | {"rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 1.2},
    ),
    "deepseek-v2": lambda: made(
        "DeepseekV2",
        **LATENT,
        q_lora_rank=None,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
    ),
    "deepseek-v3": lambda: made(
        "DeepseekV3", **LATENT, q_lora_rank=32, n_group=2, topk_group=1, num_mtp_layers=0
    ),
    "gpt-oss": lambda: made("GptOss", **GPT_OSS),
    "lfm2": lambda: made("Lfm2", **LFM2),
    "lfm2 with biases": lambda: made(
        "Lfm2",
        **(
            LFM2
            | {
                "conv_bias": True,
                "conv_L_cache": 5,
                "layer_types": ["full_attention", "conv", "conv"],
            }
        ),
    ),
}
