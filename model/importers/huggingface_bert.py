"""Reads BERT, RoBERTa, XLM-RoBERTa, DistilBERT and MPNet, as Hugging Face keeps them.

Knows: their settings and tensors, with and without the head that finds masked tokens.
Does not know: files (model/importers/huggingface_weights.py), text, pooling
(model/importers/huggingface_text.py).

What no hidden state and no masked token's logit passes through is left out: the pooler and the
head that tells whether two sentences follow each other.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from quill.model.checkpoint.typed_values import TypedValues
from quill.model.errors import ConfigError
from quill.model.importers.huggingface_config import layer_norm_config, read_activation, refuse
from quill.model.importers.tensor_layout import Layout, Part, layer_norm, linear
from quill.model.network.config import ClassActivation, ModelConfig

_UNUSED = re.compile(
    r"(^|\.)(pooler\.dense\.(weight|bias)|embeddings\.position_ids|seq_relationship\.(weight|bias))$"
)


class BertNames(NamedTuple):
    """How an architecture names its tensors. With a head the rest of the model has a prefix."""

    prefix: str
    layer: str = "encoder.layer.{}"
    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    attention_out: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    feed_forward_norm: str = "output.LayerNorm"
    head_dense: str = "lm_head.dense"
    head_norm: str = "lm_head.layer_norm"
    head_bias: str = "lm_head.bias"
    projection: str = "lm_head.decoder"  # the embedding once more, and the bias
    first_position: int = 0  # the row of the first token's position
    class_dense: str = "classifier.dense"
    class_out: str = "classifier.out_proj"


_ROBERTA = BertNames("roberta.", first_position=2)
_DISTILBERT = BertNames(
    "distilbert.",
    layer="transformer.layer.{}",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    attention_out="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    feed_forward_norm="output_layer_norm",
    head_dense="vocab_transform",
    head_norm="vocab_layer_norm",
    head_bias="vocab_projector.bias",
    projection="vocab_projector",
    class_dense="pre_classifier",
    class_out="classifier",
)
_MPNET = BertNames(
    "mpnet.",
    query="attention.attn.q",
    key="attention.attn.k",
    value="attention.attn.v",
    attention_out="attention.attn.o",
    attention_norm="attention.LayerNorm",
    first_position=2,
)
_BERT = BertNames(
    "bert.",
    head_dense="cls.predictions.transform.dense",
    head_norm="cls.predictions.transform.LayerNorm",
    head_bias="cls.predictions.bias",
    projection="cls.predictions.decoder",
    class_dense="bert.pooler.dense",
    class_out="classifier",
)


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


def read_roberta_config(settings: TypedValues) -> ModelConfig:
    """Positions are counted from behind the padding's id on."""
    refuse(settings, pad_token_id=_ROBERTA.first_position - 1)
    config = read_bert_config(settings)
    if config.context <= _ROBERTA.first_position:
        raise ConfigError(f"max_position_embeddings is {config.context}; it must be more")
    return replace(config, context=config.context - _ROBERTA.first_position)


def read_mpnet_config(settings: TypedValues) -> ModelConfig:
    """Transformers computes with 32 buckets, whatever the settings say."""
    refuse(settings, relative_attention_num_buckets=32)
    return replace(read_roberta_config(settings), num_segments=0, relative_buckets=32)


def read_distilbert_config(settings: TypedValues) -> ModelConfig:
    return layer_norm_config(
        settings.integer("dim", 768),
        settings.integer("n_heads", 12),
        family="encoder",
        vocab_size=settings.integer("vocab_size"),
        context=settings.integer("max_position_embeddings", 512),
        num_layers=0,
        num_encoder_layers=settings.integer("n_layers", 6),
        d_ff=settings.integer("hidden_dim", 3072),
        positions="learned",
        norm_placement="post",
        activation=read_activation(settings, "activation", "gelu"),
        norm_eps=1e-12,
        embedding_norm=True,
    )


def _masked(read: Callable[[TypedValues], ModelConfig]) -> Callable[[TypedValues], ModelConfig]:
    """With the head that finds masked tokens."""

    def read_masked(settings: TypedValues) -> ModelConfig:
        refuse(settings, tie_word_embeddings=True)
        return replace(read(settings), masked_head=True, output_bias=True)

    return read_masked


def _classifying(
    read: Callable[[TypedValues], ModelConfig], activation: ClassActivation = "tanh"
) -> Callable[[TypedValues], ModelConfig]:
    """With the head that classifies, or ranks, whole texts."""

    def read_classifying(settings: TypedValues) -> ModelConfig:
        labels = settings.get("id2label")
        num_classes = len(labels) if isinstance(labels, dict) else settings.integer("num_labels", 2)
        return replace(read(settings), num_classes=num_classes, class_activation=activation)

    return read_classifying


ENCODERS: dict[str, Callable[[TypedValues], ModelConfig]] = {
    "BertModel": read_bert_config,
    "BertForMaskedLM": _masked(read_bert_config),
    "BertForPreTraining": _masked(read_bert_config),
    "RobertaModel": read_roberta_config,
    "RobertaForMaskedLM": _masked(read_roberta_config),
    "XLMRobertaModel": read_roberta_config,
    "XLMRobertaForMaskedLM": _masked(read_roberta_config),
    "MPNetModel": read_mpnet_config,
    "MPNetForMaskedLM": _masked(read_mpnet_config),
    "DistilBertModel": read_distilbert_config,
    "DistilBertForMaskedLM": _masked(read_distilbert_config),
    "BertForSequenceClassification": _classifying(read_bert_config),
    "RobertaForSequenceClassification": _classifying(read_roberta_config),
    "XLMRobertaForSequenceClassification": _classifying(read_roberta_config),
    "MPNetForSequenceClassification": _classifying(read_mpnet_config),
    "DistilBertForSequenceClassification": _classifying(read_distilbert_config, "relu"),
}


def bert_names(architecture: str) -> BertNames:
    names = {"DistilBert": _DISTILBERT, "MPNet": _MPNET, "Bert": _BERT}
    found = [each for start, each in names.items() if architecture.startswith(start)]
    return found[0] if found else _ROBERTA


def takes_no_part(name: str) -> bool:
    """Whether a tensor isn't needed."""
    return bool(_UNUSED.search(name))


def bert_layout(config: ModelConfig, theirs: BertNames, names: Collection[str]) -> Layout:
    """`names`: all that the source has."""
    prefix = theirs.prefix if any(name.startswith(theirs.prefix) for name in names) else ""
    # The first checkpoints have TensorFlow's names for a norm's gains and offsets.
    is_old = any(name.endswith("LayerNorm.gamma") for name in names)
    names_of_norm = ("gamma", "beta") if is_old else ("weight", "bias")
    d_model, d_ff = config.d_model, config.d_ff
    square = (d_model, d_model)

    def norm(ours: str, source: str) -> Layout:
        return layer_norm(ours, source, d_model, names_of_norm)

    first = theirs.first_position
    positions = Part(
        f"{prefix}embeddings.position_embeddings.weight",
        (first + config.context, d_model),
        order=np.arange(first, first + config.context) if first else None,
    )
    layout: Layout = {
        "embedding.weight": [
            Part(f"{prefix}embeddings.word_embeddings.weight", (config.vocab_size, d_model))
        ],
        "position_embedding.weight": [positions],
        **norm("embedding_norm", f"{prefix}embeddings.LayerNorm"),
    }
    if config.num_segments:
        shape = (config.num_segments, d_model)
        segments = Part(f"{prefix}embeddings.token_type_embeddings.weight", shape)
        layout["segment_embedding.weight"] = [segments]
    if config.relative_buckets:
        shape = (config.relative_buckets, config.num_heads)
        bias = Part(f"{prefix}encoder.relative_attention_bias.weight", shape)
        layout["encoder_relative.weight"] = [bias]
    for index in range(config.num_encoder_layers):
        ours, layer = f"encoder.{index}", prefix + theirs.layer.format(index)
        looks = [f"{layer}.{each}" for each in (theirs.query, theirs.key, theirs.value)]
        layout |= linear(f"{ours}.attention.qkv", looks, square)
        layout |= linear(f"{ours}.attention.out", [f"{layer}.{theirs.attention_out}"], square)
        layout |= linear(f"{ours}.feed_forward.up", [f"{layer}.{theirs.up}"], (d_ff, d_model))
        layout |= linear(f"{ours}.feed_forward.down", [f"{layer}.{theirs.down}"], (d_model, d_ff))
        layout |= norm(f"{ours}.attention_residual.norm", f"{layer}.{theirs.attention_norm}")
        layout |= norm(f"{ours}.feed_forward_residual.norm", f"{layer}.{theirs.feed_forward_norm}")
    if config.masked_head:
        layout |= linear("head.dense", [theirs.head_dense], square)
        layout |= norm("head.norm", theirs.head_norm)
        layout["output_bias"] = [Part(theirs.head_bias, (config.vocab_size,))]
    if config.num_classes:
        layout |= linear("head.dense", [theirs.class_dense], square)
        layout |= linear("head.out", [theirs.class_out], (config.num_classes, d_model))
    return layout
