"""The configs of the tiny networks that tests run: one shape for each kind of network.

Tests change what they need with `dataclasses.replace`, or with `tiny` for networks of a few dozen
weights.
"""

from dataclasses import replace
from typing import Any

import torch

from quill.model.network.config import ModelConfig, Recurrence
from quill.model.network.transformer import Transformer

LLAMA = ModelConfig(
    family="causal",
    vocab_size=272,
    context=96,
    d_model=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    d_ff=96,
    positions="rotary",
    norm="rms",
    activation="swiglu",
)
_BIASES: dict[str, Any] = {"qkv_bias": True, "attention_out_bias": True, "ff_bias": True}
GPT = replace(
    LLAMA,
    num_kv_heads=4,
    positions="learned",
    norm="layer",
    activation="gelu_tanh",
    tied_embeddings=False,
    **_BIASES,
)
SEQ2SEQ = replace(
    LLAMA,
    family="seq2seq",
    context=64,
    num_encoder_layers=1,
    num_kv_heads=4,
    positions="sinusoidal",
    norm="layer",
    norm_placement="post",
    activation="relu",
    ff_bias=True,
    scale_embeddings=True,
)
ENCODER = replace(
    LLAMA,
    family="encoder",
    context=64,
    num_layers=0,
    num_encoder_layers=2,
    num_kv_heads=4,
    positions="learned",
    norm="layer",
    norm_placement="post",
    activation="gelu",
    output_bias=True,
    num_segments=2,
    embedding_norm=True,
    masked_head=True,
    **_BIASES,
)
RECURRENT = replace(
    LLAMA,
    family="seq2seq",
    context=64,
    num_encoder_layers=2,
    num_heads=1,
    num_kv_heads=1,
    head_size=64,
    d_ff=64,
    positions="none",
    norm="layer",
    activation="relu",
    output_bias=True,
    tied_embeddings=False,
    recurrence=Recurrence(cell="lstm", context="bahdanau"),
)


def tiny(vocab_size: int, context: int, **changes: Any) -> ModelConfig:
    """Llama's shape with heads of size 4: for networks whose speed matters more than their size."""
    small: dict[str, Any] = {"d_model": 16, "head_size": 4, "d_ff": 20}
    return replace(LLAMA, vocab_size=vocab_size, context=context, **(small | changes))


def randomized(config: ModelConfig, std: float = 0.4) -> Transformer:
    """A network with weights large enough that a wrong mask or position shows."""
    torch.manual_seed(0)
    model = Transformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=std)
    return model
