"""Presets: a table from a name to the shape of a network.

Knows: the sizes. Does not know: how each is trained (see model/training/recipes.py).
"""

from dataclasses import replace

from quill.model.errors import ConfigError
from quill.model.network.config import Experts, Latent, ModelConfig, Recurrence

PAPER_VOCAB_SIZE = 37_000  # "Attention Is All You Need", section 5.1: shared, English-German

# Learns English on two cores in minutes: Llama's parts but for the norm.
_TINY = ModelConfig(
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
# Table 3 of the paper, row "base".
_TRANSFORMER_BASE = replace(
    _TINY,
    family="seq2seq",
    vocab_size=PAPER_VOCAB_SIZE,
    context=512,
    d_model=512,
    num_layers=6,
    num_encoder_layers=6,
    num_heads=8,
    num_kv_heads=8,
    d_ff=2048,
    positions="sinusoidal",
    norm_placement="post",
    activation="relu",
    ff_bias=True,
    dropout=0.1,
    scale_embeddings=True,
)
# As wide as `seq2seq-tiny`. The first translator with attention (2014).
_GRU = replace(
    _TINY,
    family="seq2seq",
    context=128,
    num_layers=1,
    num_encoder_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_size=256,
    d_ff=256,
    positions="none",
    activation="relu",
    dropout=0.1,
    scale_embeddings=True,
    recurrence=Recurrence(cell="gru", context="bahdanau"),
)

PRESETS: dict[str, ModelConfig] = {
    "tiny": _TINY,
    # As much arithmetic a token as `tiny`, and three times the feed-forward weights.
    "moe-tiny": replace(
        _TINY,
        experts=Experts(number=8, per_token=2, d_expert=320, scoring="sigmoid", balanced=True),
    ),
    # The KV cache has 112 numbers a token and layer where `tiny` has 512. The weights that this
    # saves are in the feed-forward.
    "mla-tiny": replace(
        _TINY, latent=Latent(rank=48, rope_size=16, nope_size=48, value_size=64), d_ff=768
    ),
    # GPT-2 small.
    "small": replace(
        _TINY,
        vocab_size=50_257,
        context=1024,
        d_model=768,
        num_layers=12,
        num_heads=12,
        num_kv_heads=12,
        d_ff=3072,
        positions="learned",
        activation="gelu_tanh",
        qkv_bias=True,
        attention_out_bias=True,
        ff_bias=True,
        dropout=0.1,
    ),
    # For training from scratch; `quill import` has the weights.
    "llama-smollm2-135m": replace(
        _TINY,
        vocab_size=49_152,
        context=8192,
        d_model=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        d_ff=1536,
        norm="rms",
        rotary_base=100_000.0,
    ),
    # The paper's Transformer, small enough to learn short sentences on two cores.
    "seq2seq-tiny": replace(
        _TRANSFORMER_BASE,
        vocab_size=4096,
        context=128,
        d_model=256,
        num_layers=3,
        num_encoder_layers=3,
        num_heads=4,
        num_kv_heads=4,
        d_ff=1024,
    ),
    # BERT's task and head, ModernBERT's positions and norms. No norm follows the embeddings: the
    # mask token's embedding would outweigh what attention adds to it.
    "bert-tiny": replace(
        _TINY,
        family="encoder",
        context=128,
        d_model=192,
        num_layers=0,
        num_encoder_layers=4,
        head_size=48,
        d_ff=768,
        activation="gelu_tanh",
        ff_bias=True,
        output_bias=True,
        masked_head=True,
    ),
    # The source in one vector, and cells without gates.
    "rnn-fixed-tiny": replace(_GRU, recurrence=Recurrence(cell="rnn", context="fixed")),
    "gru-bahdanau-tiny": _GRU,
    "lstm-bahdanau-tiny": replace(_GRU, recurrence=Recurrence(cell="lstm", context="bahdanau")),
    "transformer-base": _TRANSFORMER_BASE,
    # Table 3 of the paper, row "big".
    "transformer-big": replace(
        _TRANSFORMER_BASE, d_model=1024, num_heads=16, num_kv_heads=16, d_ff=4096, dropout=0.3
    ),
}


def preset(name: str) -> ModelConfig:
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
