"""Small encoder–decoders of transformers', with random weights.

Their sizes are such that Quill can export them in every precision.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers

from tests.model.huggingface_models import randomised

VOCAB_SIZE, CONTEXT, START, EOS = 272, 96, 0, 1
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "pad_token_id": START,
    "eos_token_id": EOS,
    "decoder_start_token_id": START,
    "bos_token_id": START,
}


def t5(kind: str = "T5", **changes: Any) -> Any:
    """Few buckets and a short distance, so that a text has all of them."""
    sizes: dict[str, Any] = {
        **{"d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 3},
        **{"num_heads": 4, "n_positions": CONTEXT, "relative_attention_num_buckets": 16},
        "relative_attention_max_distance": 40,
    }
    own_projection = changes.pop("own_projection", False)
    config = getattr(transformers, f"{kind}Config")(**(SIZES | sizes | changes))
    model = randomised(getattr(transformers, f"{kind}ForConditionalGeneration")(config), 0.13)
    with torch.no_grad():
        if own_projection:
            torch.manual_seed(3)
            model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB_SIZE, 64) * 0.3)
        for side in (model.encoder, model.decoder):  # large enough to be seen
            side.block[0].layer[0].SelfAttention.relative_attention_bias.weight.mul_(5)
    return model


def bart(**changes: Any) -> Any:
    sizes: dict[str, Any] = {
        **{"d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 96},
        **{"decoder_ffn_dim": 96, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
        **{"max_position_embeddings": CONTEXT, "forced_eos_token_id": None},
    }
    config = transformers.BartConfig(**(SIZES | sizes | changes))
    model = randomised(transformers.BartForConditionalGeneration(config), 0.2)
    generator = torch.Generator().manual_seed(12)
    with torch.no_grad():
        for side in (model.model.encoder, model.model.decoder):
            shape = side.embed_positions.weight.shape
            side.embed_positions.weight.copy_(torch.randn(shape, generator=generator) * 0.3)
        model.final_logits_bias.copy_(torch.randn(1, VOCAB_SIZE, generator=generator))
    return model


SEQ2SEQS: dict[str, Callable[[], Any]] = {
    "t5": t5,
    "t5, gated, with a projection of its own": lambda: t5(
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, own_projection=True
    ),
    "t5, tied and not scaled": lambda: t5(tie_word_embeddings=False),
    "mt5": lambda: t5("MT5", feed_forward_proj="gated-gelu"),
    "bart": bart,
    "bart, scaled": lambda: bart(scale_embedding=True, activation_function="relu"),
}


def source_ids(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [*torch.randint(2, VOCAB_SIZE, (length - 1,), generator=generator).tolist(), EOS]
