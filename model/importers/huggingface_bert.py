"""Reads BERT, as Hugging Face keeps it.

Knows: the settings and tensors of BertModel, BertForMaskedLM and BertForPreTraining.
Does not know: files (model/importers/huggingface_weights.py), text, pooling
(model/importers/huggingface_sentence.py).

What no hidden state and no masked token's logit passes through is left out: the pooler and the
head that tells whether two sentences follow each other.
"""

import re
from collections.abc import Collection
from dataclasses import replace

from quill.model.checkpoint.typed_values import TypedValues
from quill.model.importers.huggingface_config import layer_norm_config, read_activation, refuse
from quill.model.importers.tensor_layout import Layout, Part, layer_norm, linear
from quill.model.network.config import ModelConfig

_UNUSED = re.compile(
    r"(^|\.)(pooler\.dense\.(weight|bias)|embeddings\.position_ids|seq_relationship\.(weight|bias))$"
)
HEAD_BIAS = "cls.predictions.decoder.bias"  # the output's bias under another name


def read_bert_config(settings: TypedValues) -> ModelConfig:
    """BERT without its head: it has hidden states to show, and finds no masked tokens."""
    refuse(settings, is_decoder=False, add_cross_attention=False)
    refuse(settings, position_embedding_type="absolute")
    return layer_norm_config(
        settings.integer("hidden_size"),
        settings.integer("num_attention_heads"),
        family="encoder",
        vocab_size=settings.integer("vocab_size"),
        context=settings.integer("max_position_embeddings"),
        num_layers=0,
        num_encoder_layers=settings.integer("num_hidden_layers"),
        d_ff=settings.integer("intermediate_size"),
        positions="learned",
        norm_placement="post",
        activation=read_activation(settings, "hidden_act", "gelu"),
        norm_eps=settings.number("layer_norm_eps", 1e-12),
        num_segments=settings.integer("type_vocab_size", 2),
        embedding_norm=True,
    )


def read_masked_bert_config(settings: TypedValues) -> ModelConfig:
    """BERT with the head that finds masked tokens."""
    refuse(settings, tie_word_embeddings=True)
    return replace(read_bert_config(settings), masked_head=True, output_bias=True)


def takes_no_part(name: str) -> bool:
    """Whether a tensor isn't needed."""
    return bool(_UNUSED.search(name))


def bert_layout(config: ModelConfig, names: Collection[str]) -> Layout:
    """`names`: all that the source has. With a head the rest of the model has a prefix."""
    prefix = "bert." if any(name.startswith("bert.") for name in names) else ""
    # The first checkpoints have TensorFlow's names for a norm's gains and offsets.
    is_old = any(name.endswith("LayerNorm.gamma") for name in names)
    names_of_norm = ("gamma", "beta") if is_old else ("weight", "bias")
    d_model, d_ff = config.d_model, config.d_ff
    square = (d_model, d_model)

    def norm(ours: str, theirs: str) -> Layout:
        return layer_norm(ours, f"{theirs}.LayerNorm", d_model, names_of_norm)

    tables = {
        "embedding": ("word_embeddings", config.vocab_size),
        "position_embedding": ("position_embeddings", config.context),
        "segment_embedding": ("token_type_embeddings", config.num_segments),
    }
    layout: Layout = {
        f"{ours}.weight": [Part(f"{prefix}embeddings.{theirs}.weight", (num_sequences, d_model))]
        for ours, (theirs, num_sequences) in tables.items()
        if num_sequences
    }
    layout |= norm("embedding_norm", f"{prefix}embeddings")
    for index in range(config.num_encoder_layers):
        ours, theirs = f"encoder.{index}", f"{prefix}encoder.layer.{index}"
        looks = [f"{theirs}.attention.self.{each}" for each in ("query", "key", "value")]
        attended, up, down = (
            f"{theirs}.{each}" for each in ("attention.output", "intermediate", "output")
        )
        layout |= linear(f"{ours}.attention.qkv", looks, square)
        layout |= linear(f"{ours}.attention.out", [f"{attended}.dense"], square)
        layout |= linear(f"{ours}.feed_forward.up", [f"{up}.dense"], (d_ff, d_model))
        layout |= linear(f"{ours}.feed_forward.down", [f"{down}.dense"], (d_model, d_ff))
        layout |= norm(f"{ours}.attention_residual.norm", attended)
        layout |= norm(f"{ours}.feed_forward_residual.norm", down)
    if config.masked_head:
        head = "cls.predictions.transform"
        layout |= linear("head.dense", [f"{head}.dense"], square)
        layout |= norm("head.norm", head)
        layout["output_bias"] = [Part("cls.predictions.bias", (config.vocab_size,))]
    return layout
