"""Reads BERT, as Hugging Face keeps it.

Knows: the settings and tensors of BertModel, BertForMaskedLM and BertForPreTraining.
Does not know: files (model/importers/huggingface_weights.py), text, pooling
(model/importers/huggingface_sentence.py).

What no hidden state and no masked token's logit passes through is left out: the pooler and the
head that tells whether two sentences follow each other.
"""

import re
from collections.abc import Collection

from quill.model.checkpoint.typed_values import TypedValues
from quill.model.errors import UnsupportedError
from quill.model.importers.tensor_layout import Layout, Part
from quill.model.network.config import Activation, ModelConfig

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_UNUSED = re.compile(
    r"(^|\.)(pooler\.dense\.(weight|bias)|embeddings\.position_ids|seq_relationship\.(weight|bias))$"
)
HEAD_BIAS = "cls.predictions.decoder.bias"  # the output's bias under another name


def read_bert_config(settings: TypedValues) -> ModelConfig:
    """BERT without its head: it has hidden states to show, and finds no masked tokens."""
    for name in ("is_decoder", "add_cross_attention"):
        if settings.flag(name, False):
            raise UnsupportedError(
                f"the model has {name} true; Quill reads BERT as an encoder only"
            )
    kind = settings.text("position_embedding_type", "absolute")
    if kind != "absolute":
        raise UnsupportedError(
            f"the model's position_embedding_type is {kind!r}; Quill knows 'absolute'"
        )
    activation = settings.text("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        raise UnsupportedError(
            f"the model's hidden_act is {activation!r}; Quill knows {', '.join(_ACTIVATIONS)}"
        )
    d_model, num_heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    return ModelConfig(
        family="encoder",
        vocab_size=settings.integer("vocab_size"),
        context=settings.integer("max_position_embeddings"),
        d_model=d_model,
        num_layers=0,
        num_encoder_layers=settings.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=d_model // max(num_heads, 1),
        d_ff=settings.integer("intermediate_size"),
        positions="learned",
        norm="layer",
        norm_placement="post",
        activation=_ACTIVATIONS[activation],
        qkv_bias=True,
        attention_out_bias=True,
        ff_bias=True,
        norm_eps=settings.number("layer_norm_eps", 1e-12),
        num_segments=settings.integer("type_vocab_size", 2),
        embedding_norm=True,
    )


def read_masked_bert_config(settings: TypedValues) -> ModelConfig:
    """BERT with the head that finds masked tokens."""
    if not settings.flag("tie_word_embeddings", True):
        raise UnsupportedError(
            "the model has tie_word_embeddings false; Quill reads BERT with true only"
        )
    values = read_bert_config(settings).to_dict()
    return ModelConfig.from_dict(values | {"masked_head": True, "output_bias": True})


def takes_no_part(name: str) -> bool:
    """Whether a tensor isn't needed."""
    return bool(_UNUSED.search(name))


def bert_layout(config: ModelConfig, names: Collection[str]) -> Layout:
    """`names`: all that the source has. With a head the rest of the model has a prefix."""
    prefix = "bert." if any(name.startswith("bert.") for name in names) else ""
    # The first checkpoints have TensorFlow's names for a norm's gains and offsets.
    is_old = any(name.endswith("LayerNorm.gamma") for name in names)
    gains, offsets = ("gamma", "beta") if is_old else ("weight", "bias")
    d_model, d_ff = config.d_model, config.d_ff

    def norm(ours: str, theirs: str) -> Layout:
        return {
            f"{ours}.weight": [Part(f"{theirs}.LayerNorm.{gains}", (d_model,))],
            f"{ours}.bias": [Part(f"{theirs}.LayerNorm.{offsets}", (d_model,))],
        }

    def linear(ours: str, theirs: list[str], num_outputs: int, num_inputs: int) -> Layout:
        shape = (num_outputs, num_inputs)
        return {
            f"{ours}.weight": [Part(f"{each}.weight", shape) for each in theirs],
            f"{ours}.bias": [Part(f"{each}.bias", shape[:1]) for each in theirs],
        }

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
        layout |= linear(f"{ours}.attention.qkv", looks, d_model, d_model)
        layout |= linear(f"{ours}.attention.out", [f"{attended}.dense"], d_model, d_model)
        layout |= linear(f"{ours}.feed_forward.up", [f"{up}.dense"], d_ff, d_model)
        layout |= linear(f"{ours}.feed_forward.down", [f"{down}.dense"], d_model, d_ff)
        layout |= norm(f"{ours}.attention_residual.norm", attended)
        layout |= norm(f"{ours}.feed_forward_residual.norm", down)
    if config.masked_head:
        head = "cls.predictions.transform"
        layout |= linear("head.dense", [f"{head}.dense"], d_model, d_model)
        layout |= norm("head.norm", head)
        layout["output_bias"] = [Part("cls.predictions.bias", (config.vocab_size,))]
    return layout
