"""Reads the shape of a model out of a Hugging Face config.json.

Knows: the settings of the Llama family and of GPT-2, as transformers 4 and 5 spell them, and
their defaults there. Does not know: files, tensors, tokenizers; Marian's are in
model/importers/huggingface_marian.py, BERT's in model/importers/huggingface_bert.py.
"""

from collections.abc import Callable

from quill.model.checkpoint.typed_values import TypedValues
from quill.model.errors import UnsupportedError
from quill.model.importers.huggingface_bert import read_bert_config, read_masked_bert_config
from quill.model.importers.huggingface_marian import read_marian_config
from quill.model.network.config import Activation, ModelConfig, RotaryScaling

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
            "the model's weights are quantised (its config.json has a quantization_config); Quill "
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


def _llama(settings: TypedValues) -> ModelConfig:
    attention_bias = settings.flag("attention_bias", False)
    return _llama_family(
        settings,
        qkv_bias=attention_bias,
        attention_out_bias=attention_bias,
        ff_bias=settings.flag("mlp_bias", False),
    )


def _mistral(settings: TypedValues) -> ModelConfig:
    # An absent setting and a null differ here: absent, the window is 4,096 tokens.
    window = settings.get("sliding_window") if "sliding_window" in settings.names else 4096
    context = settings.integer("max_position_embeddings")
    if isinstance(window, int) and window < context:
        raise UnsupportedError(
            f"the model attends through a sliding window of {window} tokens in a context of "
            f"{context}; Quill attends to the whole context only"
        )
    return _llama_family(settings, default_kv_heads=8)


def _qwen2(settings: TypedValues) -> ModelConfig:
    return _llama_family(settings, qkv_bias=True)


def _llama_family(
    settings: TypedValues,
    *,
    qkv_bias: bool = False,
    attention_out_bias: bool = False,
    ff_bias: bool = False,
    default_kv_heads: int | None = None,
) -> ModelConfig:
    _refuse_sliding_layers(settings)
    activation = settings.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedError(f"the model's hidden_act is {activation!r}; Quill knows 'silu'")
    d_model, num_heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    rotary = _rotary_settings(settings)
    context = settings.integer("max_position_embeddings")
    return ModelConfig(
        family="causal",
        vocab_size=settings.integer("vocab_size"),
        context=context,
        d_model=d_model,
        num_layers=settings.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=settings.integer("num_key_value_heads", default_kv_heads or num_heads),
        head_size=settings.integer("head_dim", d_model // max(num_heads, 1)),
        d_ff=settings.integer("intermediate_size"),
        positions="rotary",
        norm="rms",
        activation="swiglu",
        qkv_bias=qkv_bias,
        attention_out_bias=attention_out_bias,
        ff_bias=ff_bias,
        tied_embeddings=settings.flag("tie_word_embeddings", False),
        norm_eps=settings.number("rms_norm_eps", 1e-6),
        rotary_base=rotary.number("rope_theta", settings.number("rope_theta", 10_000.0)),
        rotary_scaling=_rotary_scaling(rotary, context),
    )


def _refuse_sliding_layers(settings: TypedValues) -> None:
    kinds = settings.get("layer_types")
    others = {str(kind) for kind in kinds} - {"full_attention"} if isinstance(kinds, list) else None
    if others or settings.flag("use_sliding_window", False):
        raise UnsupportedError(
            f"the model has layers of {', '.join(sorted(others or {'sliding_attention'}))}; Quill "
            "attends to the whole context in every layer"
        )


def _rotary_settings(settings: TypedValues) -> TypedValues:
    """`rope_parameters` in transformers 5, `rope_scaling` in 4."""
    for name in ("rope_parameters", "rope_scaling"):
        value = settings.get(name)
        if isinstance(value, dict):
            return TypedValues(value, f"{name} in the config.json")
    return TypedValues({}, "config.json")


def _rotary_scaling(rotary: TypedValues, context: int) -> RotaryScaling | None:
    kind = rotary.text("rope_type", rotary.text("type", "default"))
    if rotary.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedError("the model turns only part of each head; Quill turns all of it")
    if kind == "default":
        return None
    if kind == "linear":
        return RotaryScaling(kind="linear", factor=rotary.number("factor"))
    if kind == "llama3":
        return RotaryScaling(
            kind="llama3",
            factor=rotary.number("factor"),
            low_freq_factor=rotary.number("low_freq_factor"),
            high_freq_factor=rotary.number("high_freq_factor"),
            original_context=rotary.integer("original_max_position_embeddings", context),
        )
    raise UnsupportedError(
        f"the model stretches rotary positions by {kind!r}; Quill knows 'linear' and 'llama3'"
    )


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
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "GPT2LMHeadModel": _gpt2,
    "MarianMTModel": read_marian_config,
    "BertModel": read_bert_config,
    "BertForMaskedLM": read_masked_bert_config,
    "BertForPreTraining": read_masked_bert_config,
}
