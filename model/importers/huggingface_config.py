"""Reads the shape of a model out of a Hugging Face config.json.

Knows: which architectures there are, and GPT-2's settings, as transformers 4 and 5 spell them, and
their defaults there. Does not know: files, tensors, tokenizers; the Llama family's settings are in
model/importers/huggingface_llama.py, Marian's in model/importers/huggingface_marian.py,
BERT's in model/importers/huggingface_bert.py.
"""

from collections.abc import Callable

from quill.model.checkpoint.typed_values import TypedValues
from quill.model.errors import UnsupportedError
from quill.model.importers.huggingface_bert import read_bert_config, read_masked_bert_config
from quill.model.importers.huggingface_llama import LLAMA_FAMILY
from quill.model.importers.huggingface_marian import read_marian_config
from quill.model.network.config import Activation, ModelConfig

_ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def read_config(settings: TypedValues) -> ModelConfig:
    architecture = read_architecture(settings)
    if settings.get("quantization_config") is not None:
        raise UnsupportedError(
            "the model's weights are quantized (its config.json has a quantization_config); Quill "
            "reads plain ones, in float32, float16 or bfloat16. Use the model that it was made from"
        )
    return ARCHITECTURES[architecture](settings)


def read_architecture(settings: TypedValues) -> str:
    listed = settings.get("architectures")
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    known = [name for name in names if name in ARCHITECTURES]
    if len(names) != 1 or not known:
        raise UnsupportedError(
            f"the model's architecture is {', '.join(names) or 'not named in its config.json'}; "
            f"Quill reads {', '.join(ARCHITECTURES)}"
        )
    return known[0]


def _gpt2(settings: TypedValues) -> ModelConfig:
    activation = settings.text("activation_function", "gelu_new")
    if activation not in _ACTIVATIONS:
        raise UnsupportedError(
            f"the model's activation_function is {activation!r}; Quill knows "
            f"{', '.join(_ACTIVATIONS)}"
        )
    _refuse_other_attention(settings)
    d_model, num_heads = settings.integer("n_embd"), settings.integer("n_head")
    return ModelConfig(
        family="causal",
        vocab_size=settings.integer("vocab_size"),
        context=settings.integer("n_positions"),
        d_model=d_model,
        num_layers=settings.integer("n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=d_model // max(num_heads, 1),
        d_ff=settings.integer("n_inner", 4 * d_model),
        positions="learned",
        norm="layer",
        activation=_ACTIVATIONS[activation],
        qkv_bias=True,
        attention_out_bias=True,
        ff_bias=True,
        tied_embeddings=settings.flag("tie_word_embeddings", True),
        norm_eps=settings.number("layer_norm_epsilon", 1e-5),
    )


def _refuse_other_attention(settings: TypedValues) -> None:
    usual = {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }
    for name, value in usual.items():
        if settings.flag(name, value) != value:
            raise UnsupportedError(f"the model has {name} {not value}; Quill knows {value} only")


ARCHITECTURES: dict[str, Callable[[TypedValues], ModelConfig]] = {
    **LLAMA_FAMILY,
    "GPT2LMHeadModel": _gpt2,
    "MarianMTModel": read_marian_config,
    "BertModel": read_bert_config,
    "BertForMaskedLM": read_masked_bert_config,
    "BertForPreTraining": read_masked_bert_config,
}
