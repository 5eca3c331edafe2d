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


def _made(name: str, **settings: Any) -> Any:
    config = getattr(transformers, f"{name}{'Text' if name == 'Gemma3' else ''}Config")(
        **(SIZES | settings)
    )
    config._attn_implementation = "eager"  # PyTorch's own knows no soft cap
    model = randomised(getattr(transformers, f"{name}ForCausalLM")(config))
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.copy_((buffer + 1).cumsum(0) * 0.01)
    return model


SUCCESSORS: dict[str, Callable[[], Any]] = {
    "mistral with a window": lambda: _made("Mistral", sliding_window=20, head_dim=16),
    "qwen3": lambda: _made("Qwen3", head_dim=32),
    "olmo-2": lambda: _made("Olmo2"),
    "phi-3": lambda: _made("Phi3", sliding_window=33),
    "gemma 2": lambda: _made("Gemma2", head_dim=32, sliding_window=20, query_pre_attn_scalar=24),
    "gemma 3": lambda: _made(
        "Gemma3",
        head_dim=32,
        sliding_window=20,
        sliding_window_pattern=2,
        query_pre_attn_scalar=24,
        final_logit_softcapping=3.0,
        tie_word_embeddings=True,
    ),
    "mixtral": lambda: _made("Mixtral", num_local_experts=5, num_experts_per_tok=2),
    "qwen3-moe": lambda: _made(
        "Qwen3Moe",
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=64,
        mlp_only_layers=[0],
    ),
    "deepseek-v2": lambda: _made(
        "DeepseekV2",
        **LATENT,
        q_lora_rank=None,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
    ),
    "deepseek-v3": lambda: _made(
        "DeepseekV3", **LATENT, q_lora_rank=32, n_group=2, topk_group=1, num_mtp_layers=0
    ),
}
