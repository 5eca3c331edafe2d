"""What the settings of several architectures in a Hugging Face config.json have in common.

Knows: names of activations, refused settings, the shape of networks with layer norms.
Does not know: files, tensors, tokenizers, any one architecture.
"""

from typing import Any

from quill.model.checkpoint.typed_values import TypedValues
from quill.model.errors import UnsupportedError
from quill.model.network.config import Activation, ModelConfig

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
