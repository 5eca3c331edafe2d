"""Named shapes: a small table from a preset's name to a config.

Knows: the sizes. Does not know: how each is trained (see model/training/recipes.py).
"""

import dataclasses
from collections.abc import Callable

from quill.model.errors import ConfigError
from quill.model.network.config import (
    CellKind,
    ContextKind,
    Experts,
    Latent,
    ModelConfig,
    Recurrence,
)

PAPER_VOCAB_SIZE = 37_000  # "Attention Is All You Need", section 5.1: shared, English-German


def tiny() -> ModelConfig:
    """Small enough to learn English on two cores in minutes: Llama's parts but for the norm."""
    return ModelConfig(
        family="causal",
        vocab_size=4096,
        context=256,
        d_model=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        head_size=64,
        d_ff=672,  # as many parameters as a plain feed-forward of 4 x d_model
        positions="rotary",
        norm="layer",  # on a CPU PyTorch computes it faster than RMSNorm
        activation="swiglu",
    )


def moe_tiny() -> ModelConfig:
    """`tiny` with experts: as much arithmetic a token, and three times the feed-forward weights."""
    experts = Experts(number=8, per_token=2, d_expert=320, scoring="sigmoid", balanced=True)
    return dataclasses.replace(tiny(), experts=experts)


def mla_tiny() -> ModelConfig:
    """`tiny` with latent attention: what a token leaves in the cache is 112 numbers a layer where
    `tiny` has 512. The weights that this saves are in the feed-forward."""
    latent = Latent(rank=48, rope_size=16, nope_size=48, value_size=64)
    return dataclasses.replace(tiny(), latent=latent, d_ff=768)


def small() -> ModelConfig:
    """The shape of GPT-2 small."""
    return ModelConfig(
        family="causal",
        vocab_size=50_257,
        context=1024,
        d_model=768,
        num_layers=12,
        num_heads=12,
        num_kv_heads=12,
        head_size=64,
        d_ff=3072,
        positions="learned",
        norm="layer",
        activation="gelu_tanh",
        qkv_bias=True,
        attention_out_bias=True,
        ff_bias=True,
        dropout=0.1,
    )


def llama_smollm2_135m() -> ModelConfig:
    """The shape of SmolLM2-135M, for training from scratch; the weights come by import."""
    return ModelConfig(
        family="causal",
        vocab_size=49_152,
        context=8192,
        d_model=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_size=64,
        d_ff=1536,
        positions="rotary",
        norm="rms",
        activation="swiglu",
        rotary_base=100_000.0,
    )


def seq2seq_tiny() -> ModelConfig:
    """The paper's Transformer, small enough to learn short sentences on two cores."""
    return _paper_shape(
        vocab_size=4096, context=128, d_model=256, num_heads=4, d_ff=1024, num_layers=3, dropout=0.1
    )


def bert_tiny() -> ModelConfig:
    """BERT's task and head with ModernBERT's positions and norms. No norm follows the embeddings:
    a mask's own vector would be so large that what attention brings to it is hardly seen."""
    return ModelConfig(
        family="encoder",
        vocab_size=4096,
        context=128,
        d_model=192,
        num_layers=0,
        num_encoder_layers=4,
        num_heads=4,
        num_kv_heads=4,
        head_size=48,
        d_ff=768,
        positions="rotary",
        norm="layer",
        activation="gelu_tanh",
        ff_bias=True,
        output_bias=True,
        masked_head=True,
    )


def transformer_base() -> ModelConfig:
    """Table 3 of the paper, row "base"."""
    return _paper_shape(
        vocab_size=PAPER_VOCAB_SIZE, d_model=512, num_heads=8, d_ff=2048, num_layers=6, dropout=0.1
    )


def transformer_big() -> ModelConfig:
    """Table 3 of the paper, row "big"."""
    return _paper_shape(
        vocab_size=PAPER_VOCAB_SIZE,
        d_model=1024,
        num_heads=16,
        d_ff=4096,
        num_layers=6,
        dropout=0.3,
    )


def _paper_shape(
    *,
    vocab_size: int,
    d_model: int,
    num_heads: int,
    d_ff: int,
    num_layers: int,
    dropout: float,
    context: int = 512,
) -> ModelConfig:
    return ModelConfig(
        family="seq2seq",
        vocab_size=vocab_size,
        context=context,
        d_model=d_model,
        num_layers=num_layers,
        num_encoder_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=d_model // num_heads,
        d_ff=d_ff,
        positions="sinusoidal",
        norm="layer",
        norm_placement="post",
        activation="relu",
        ff_bias=True,
        dropout=dropout,
        scale_embeddings=True,
    )


def rnn_fixed_tiny() -> ModelConfig:
    """The plainest: a whole sentence in one vector, and cells without gates."""
    return _recurrent_shape("rnn", "fixed")


def gru_bahdanau_tiny() -> ModelConfig:
    """The first translator that looked at its source (2014)."""
    return _recurrent_shape("gru", "bahdanau")


def lstm_bahdanau_tiny() -> ModelConfig:
    return _recurrent_shape("lstm", "bahdanau")


def _recurrent_shape(cell: CellKind, context: ContextKind) -> ModelConfig:
    """As wide as `seq2seq-tiny`."""
    return ModelConfig(
        family="seq2seq",
        vocab_size=4096,
        context=128,
        d_model=256,
        num_layers=1,
        num_encoder_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=256,
        d_ff=256,
        positions="none",
        norm="layer",
        activation="relu",
        dropout=0.1,
        scale_embeddings=True,
        recurrence=Recurrence(cell=cell, context=context),
    )


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "tiny": tiny,
    "moe-tiny": moe_tiny,
    "mla-tiny": mla_tiny,
    "small": small,
    "llama-smollm2-135m": llama_smollm2_135m,
    "seq2seq-tiny": seq2seq_tiny,
    "bert-tiny": bert_tiny,
    "rnn-fixed-tiny": rnn_fixed_tiny,
    "gru-bahdanau-tiny": gru_bahdanau_tiny,
    "lstm-bahdanau-tiny": lstm_bahdanau_tiny,
    "transformer-base": transformer_base,
    "transformer-big": transformer_big,
}


def preset(name: str) -> ModelConfig:
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]()
