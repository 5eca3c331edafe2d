"""The parts that a Transformer is stacked from: norms, attention, feed-forward, two layers.

Knows: projections and residuals. Does not know: how attention finds its keys (see
model/network/attention.py), embeddings, how many layers there are.
"""

import functools
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from quill.model.network.attention import Attending, KeyValue, split_heads
from quill.model.network.config import ModelConfig

# B rows · T new tokens · S source tokens · D model size · F feed-forward size
# E = heads x head size, flat


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps)


class Residual(nn.Module):
    """x + sublayer(x), with the norm before the sublayer (pre) or after the sum (post)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = make_norm(config)
        self.dropout = nn.Dropout(config.dropout)
        self._pre = config.norm_placement == "pre"

    def forward(self, x_BTD: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        y_BTD: Tensor
        if self._pre:
            y_BTD = x_BTD + self.dropout(sublayer(self.norm(x_BTD)))
        else:
            y_BTD = self.norm(x_BTD + self.dropout(sublayer(x_BTD)))
        return y_BTD


class SelfAttention(nn.Module):
    """Projects to queries, keys and values in one go, attends, projects back."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        num_heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv = nn.Linear(config.d_model, num_heads * config.head_size, bias=config.qkv_bias)
        self.out = nn.Linear(
            config.num_heads * config.head_size, config.d_model, bias=config.attention_out_bias
        )

    def forward(self, x_BTD: Tensor, layer: int, attending: Attending) -> Tensor:
        y_BTD: Tensor = self.out(attending.self_attention(layer, self.qkv(x_BTD)))
        return y_BTD


class CrossAttention(nn.Module):
    """Queries from the decoder, keys and values from the encoder, computed once a source."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._head_size = config.head_size
        width = config.num_heads * config.head_size
        kv_width = config.num_kv_heads * config.head_size
        self.query = nn.Linear(config.d_model, width, bias=config.qkv_bias)
        self.key_value = nn.Linear(config.d_model, 2 * kv_width, bias=config.qkv_bias)
        self.out = nn.Linear(width, config.d_model, bias=config.attention_out_bias)

    def park(self, memory_BSD: Tensor) -> KeyValue:
        k_BSE, v_BSE = self.key_value(memory_BSD).chunk(2, dim=-1)
        return KeyValue(split_heads(k_BSE, self._head_size), split_heads(v_BSE, self._head_size))

    def forward(self, x_BTD: Tensor, layer: int, attending: Attending) -> Tensor:
        y_BTD: Tensor = self.out(attending.cross_attention(layer, self.query(x_BTD)))
        return y_BTD


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class FeedForward(nn.Module):
    """Widens, bends, narrows. SwiGLU computes its gate and its value in one projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._gated = config.activation == "swiglu"
        self._bend = ACTIVATIONS["silu" if self._gated else config.activation]
        width = config.d_ff * (2 if self._gated else 1)
        self.up = nn.Linear(config.d_model, width, bias=config.ff_bias)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.ff_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTF = self.up(x_BTD)
        if self._gated:
            gate_BTF, value_BTF = h_BTF.chunk(2, dim=-1)
            h_BTF = self._bend(gate_BTF) * value_BTF
        else:
            h_BTF = self._bend(h_BTF)
        y_BTD: Tensor = self.down(h_BTF)
        return y_BTD


class MaskedHead(nn.Module):
    """What an encoder's hidden states pass before they become logits: dense, bend, norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.d_model, config.d_model, bias=config.ff_bias)
        self._bend = ACTIVATIONS["silu" if config.activation == "swiglu" else config.activation]
        self.norm = make_norm(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD: Tensor = self.norm(self._bend(self.dense(x_BTD)))
        return y_BTD


class EncoderLayer(nn.Module):
    """Self-attention in both directions, then feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_residual = Residual(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_residual = Residual(config)

    def forward(self, x_BTD: Tensor, layer: int, attending: Attending) -> Tensor:
        x_BTD = self.attention_residual(x_BTD, lambda x: self.attention(x, layer, attending))
        y_BTD: Tensor = self.feed_forward_residual(x_BTD, self.feed_forward)
        return y_BTD


class DecoderLayer(EncoderLayer):
    """An encoder layer that may also look at an encoded source, between its two halves."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.cross: CrossAttention | None = None
        if config.family == "seq2seq":
            self.cross = CrossAttention(config)
            self.cross_residual = Residual(config)

    def forward(self, x_BTD: Tensor, layer: int, attending: Attending) -> Tensor:
        x_BTD = self.attention_residual(x_BTD, lambda x: self.attention(x, layer, attending))
        if self.cross is not None:
            cross = self.cross
            x_BTD = self.cross_residual(x_BTD, lambda x: cross(x, layer, attending))
        y_BTD: Tensor = self.feed_forward_residual(x_BTD, self.feed_forward)
        return y_BTD
