"""What the settings of several architectures in a Hugging Face config.json have in common.

Knows: names of activations, refused settings, the shape of networks with layer norms, windows,
rotary positions and how they are stretched.
Does not know: files, tensors, tokenizers, any one architecture.
"""

import math
from typing import Any

from quill.model.checkpoint.typed_values import TypedValues
from quill.model.errors import CheckpointError, UnsupportedError
from quill.model.network.config import Activation, ModelConfig, RotaryScaling

SLIDING, FULL, CONV = "sliding_attention", "full_attention", "conv"

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def refuse(settings: TypedValues, **known: Any) -> None:
    """Settings that Quill knows one value of; absent, they have it."""
    for name, value in known.items():
        found = settings.get(name)
        if isinstance(value, list):
            others = set(map(str, found)) - set(value) if isinstance(found, list) else set()
            found = sorted(others) or None
        if found is not None and found != value:
            raise UnsupportedError(f"the model has {name} {found!r}; Quill knows {value!r} only")


def read_activation(settings: TypedValues, name: str, default: str) -> Activation:
    found = settings.text(name, default)
    if found not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise UnsupportedError(f"the model's {name} is {found!r}; Quill knows {known}")
    return _ACTIVATIONS[found]


def layer_norm_config(d_model: int, num_heads: int, **own: Any) -> ModelConfig:
    """With layer norms, biases everywhere, and as many K/V heads as heads."""
    return ModelConfig(
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=d_model // max(num_heads, 1),
        norm="layer",
        qkv_bias=True,
        attention_out_bias=True,
        ff_bias=True,
        **own,
    )


def one_window(settings: TypedValues, window: int) -> dict[str, Any]:
    """The same in all layers. Layers of other types are refused: transformers overlooks them."""
    if window:
        refuse(settings, layer_types=[SLIDING])
    return layer_windows(settings, window, SLIDING)


def layer_windows(settings: TypedValues, window: int, default: str | int) -> dict[str, Any]:
    """Which layers see a window only. `default`: what all are, or every how many-th sees all."""
    num_layers = settings.integer("num_hidden_layers")
    if settings.get("layer_types") is not None:
        kinds = settings.texts("layer_types")
    elif isinstance(default, int):
        kinds = [FULL if (i + 1) % default == 0 else SLIDING for i in range(num_layers)]
    else:
        kinds = [default] * num_layers
    if len(kinds) != num_layers:
        raise CheckpointError(f"the model has {len(kinds)} layer_types for {num_layers} layers")
    if unknown := set(kinds) - {SLIDING, FULL}:
        raise UnsupportedError(f"the model has layers of {', '.join(sorted(unknown))}")
    if window == 0 or SLIDING not in kinds:
        return {}
    pattern = kinds.index(FULL) + 1 if FULL in kinds else 0
    if any((kind == FULL) != (pattern and (i + 1) % pattern == 0) for i, kind in enumerate(kinds)):
        raise UnsupportedError(
            f"the model's layer_types are {kinds}; Quill knows windows in all layers, or in all "
            "but every so many-th"
        )
    # As long as the context, and the same in all layers: then it leaves nothing out.
    if not pattern and window >= settings.integer("max_position_embeddings"):
        return {}
    return {"window": window, "window_pattern": pattern}


def conv_layers(settings: TypedValues) -> list[str]:
    """Which layers have a short convolution. Without a list of any kind all have attention."""
    num_layers = settings.integer("num_hidden_layers")
    if settings.get("layer_types") is not None:
        kinds = settings.texts("layer_types")
    elif settings.get("full_attn_idxs") is not None:
        full = settings.integers("full_attn_idxs")
        kinds = [FULL if index in full else CONV for index in range(num_layers)]
    else:
        kinds = [FULL] * num_layers
    if len(kinds) != num_layers:
        raise CheckpointError(f"the model has {len(kinds)} layer_types for {num_layers} layers")
    if unknown := set(kinds) - {FULL, CONV}:
        raise UnsupportedError(f"the model has layers of {', '.join(sorted(unknown))}")
    return kinds


def rotary_settings(settings: TypedValues) -> TypedValues:
    """`rope_parameters` in transformers 5, `rope_scaling` in 4: there it wins if both are there."""
    name = "rope_scaling" if _object(settings, "rope_scaling") else "rope_parameters"
    values = _object(settings, name)
    if {SLIDING, FULL} & set(values):
        raise UnsupportedError(
            f"the model has {name} for each kind of layer; Quill knows that of Gemma 3 and OLMo-3"
        )
    return TypedValues(values, f"{name} in the config.json")


def rotary_by_kind(settings: TypedValues) -> tuple[TypedValues, TypedValues]:
    """Gemma 3's and OLMo-3's, of layers that see all and of layers with a window. `rope_scaling` is
    added to the former's."""
    name = "rope_parameters"
    by_kind = TypedValues(_object(settings, name), name)
    if others := sorted(set(by_kind.names) - {SLIDING, FULL}):
        raise UnsupportedError(
            f"the model's {name} have {others[0]}; Quill knows {SLIDING} and {FULL} in Gemma 3's"
        )
    full = _object(by_kind, FULL) | _object(settings, "rope_scaling")
    return TypedValues(full, f"{name} of {FULL}"), TypedValues(_object(by_kind, SLIDING), name)


def _object(settings: TypedValues, name: str) -> dict[str, Any]:
    return {} if settings.get(name) is None else settings.mapping(name)


def rotary_scaling(rotary: TypedValues, context: int) -> RotaryScaling | None:
    kind = rotary.text("rope_type", rotary.text("type", "default"))
    original = rotary.integer("original_max_position_embeddings", context)
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
            original_context=original,
        )
    if kind == "yarn":
        factor = rotary.number("factor", context / original)
        return RotaryScaling(
            kind="yarn",
            factor=factor,
            low_freq_factor=rotary.number("beta_slow", 1.0),
            high_freq_factor=rotary.number("beta_fast", 32.0),
            original_context=original,
            attention_factor=rotary.number("attention_factor", _yarn_factor(rotary, factor)),
            truncate=rotary.flag("truncate", True),
        )
    if kind in ("longrope", "su"):
        return _longrope(rotary, context, original)
    raise UnsupportedError(
        f"the model stretches rotary positions by {kind!r}; Quill knows 'linear', 'llama3', 'yarn' "
        "and 'longrope'"
    )


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_factor(rotary: TypedValues, factor: float) -> float:
    weight, of_all = rotary.number("mscale", 0.0), rotary.number("mscale_all_dim", 0.0)
    if weight and of_all:
        return yarn_scale(factor, weight) / yarn_scale(factor, of_all)
    return yarn_scale(factor)


def _longrope(rotary: TypedValues, context: int, original: int) -> RotaryScaling:
    """The divisors for long texts where the context is longer than the original one, whatever a
    text's length: transformers changes to them in the middle of a text, keys in its cache stay."""
    factor = rotary.number("factor", context / original)
    name = "long_factor" if context > original else "short_factor"
    divisors = rotary.get(name)
    if not isinstance(divisors, list) or not all(type(each) in (int, float) for each in divisors):
        raise CheckpointError(f"the model's {name} is no list of numbers")
    usual = 1.0
    if factor > 1 and original > 1:
        usual = math.sqrt(1 + math.log(factor) / math.log(original))
    return RotaryScaling(
        kind="longrope",
        factor=max(factor, 1.0),
        original_context=original,
        divisors=tuple(float(each) for each in divisors),
        attention_factor=rotary.number("attention_factor", usual),
    )
