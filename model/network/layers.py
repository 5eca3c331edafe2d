"""The layers of a Transformer: norms, attention, feed-forward, encoder and decoder layer.

Knows: projections and residuals. Does not know: how attention is computed (see
model/network/attention.py), embeddings, how many layers there are.
"""

import functools
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quill.model.network.attention import (
    AttentionImplementation,
    KeyValue,
    soft_capped,
    split_heads,
)
from quill.model.network.config import ModelConfig, ShortConv

# B batch · T new tokens · S source tokens · D model size · F feed-forward size
# E = heads x head size, flat


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps)


class Residual(nn.Module):
    """x + sublayer(x), with the norm before the sublayer (pre), after the sum (post), between the
    two (output), or both before the sublayer and between (sandwich)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = make_norm(config)
        self.dropout = nn.Dropout(config.dropout)
        self._placement = config.norm_placement
        self._scale = config.residual_scale
        if self._placement == "sandwich":
            self.after = make_norm(config)

    def forward(self, x_BTD: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        y_BTD: Tensor
        if self._scale != 1.0:
            sublayer = functools.partial(_scaled, sublayer, self._scale)
        match self._placement:
            case "pre":
                y_BTD = x_BTD + self.dropout(sublayer(self.norm(x_BTD)))
            case "post":
                y_BTD = self.norm(x_BTD + self.dropout(sublayer(x_BTD)))
            case "output":
                y_BTD = x_BTD + self.dropout(self.norm(sublayer(x_BTD)))
            case "sandwich":
                y_BTD = x_BTD + self.dropout(self.after(sublayer(self.norm(x_BTD))))
        return y_BTD


def _scaled(sublayer: Callable[[Tensor], Tensor], scale: float, x_BTD: Tensor) -> Tensor:
    return sublayer(x_BTD) * scale


class QueryKeyNorm(nn.Module):
    """RMS norms of queries and keys, before rotary positions: of each head, or of all together."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        heads = (config.num_heads, config.num_kv_heads)
        self._head_size = config.head_size if config.qk_norm == "head" else None
        self._widths = [num * config.head_size for num in (*heads, config.num_kv_heads)]
        sizes = [self._head_size or width for width in self._widths]
        self.query = nn.RMSNorm(sizes[0], eps=config.norm_eps)
        self.key = nn.RMSNorm(sizes[1], eps=config.norm_eps)

    def forward(self, qkv_BTE: Tensor) -> Tensor:
        q_BTE, k_BTE, v_BTE = torch.split(qkv_BTE, self._widths, dim=-1)
        return torch.cat((self._of(self.query, q_BTE), self._of(self.key, k_BTE), v_BTE), dim=-1)

    def _of(self, norm: nn.Module, x_BTE: Tensor) -> Tensor:
        if self._head_size is None:
            return cast(Tensor, norm(x_BTE))
        heads = torch.unflatten(x_BTE, -1, (-1, self._head_size))
        return cast(Tensor, norm(heads)).flatten(-2)


class SelfAttention(nn.Module):
    """Fused projection to queries, keys and values, attention, output projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        num_heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv = nn.Linear(config.d_model, num_heads * config.head_size, bias=config.qkv_bias)
        self.out = nn.Linear(
            config.num_heads * config.head_size, config.d_model, bias=config.attention_out_bias
        )
        self.qk_norm = nn.Identity() if config.qk_norm == "none" else QueryKeyNorm(config)
        self.sinks_N: nn.Parameter | None = None
        if config.attention_sinks:
            self.sinks_N = nn.Parameter(torch.zeros(config.num_heads))

    def forward(self, x_BTD: Tensor, layer: int, attn_impl: AttentionImplementation) -> Tensor:
        qkv_BTE = self.qk_norm(self.qkv(x_BTD))
        y_BTD: Tensor = self.out(attn_impl.self_attention(layer, qkv_BTE, self.sinks_N))
        return y_BTD


class ShortConvolution(nn.Module):
    """Replaces a layer's self-attention: a causal convolution over a few tokens between two gates,
    which are computed of the token."""

    def __init__(self, config: ModelConfig, conv: ShortConv) -> None:
        super().__init__()
        d_model = config.d_model
        self.into = nn.Linear(d_model, 3 * d_model, bias=conv.bias)
        self.kernel_DL = nn.Parameter(torch.full((d_model, conv.taps), 1 / conv.taps))
        self.bias_D = nn.Parameter(torch.zeros(d_model)) if conv.bias else None
        self.out = nn.Linear(d_model, d_model, bias=conv.bias)

    def forward(self, x_BTD: Tensor, layer: int, attn_impl: AttentionImplementation) -> Tensor:
        y_BTD: Tensor = self.out(self.convolve(self.into(x_BTD), layer, attn_impl))
        return y_BTD

    def convolve(self, x_BTE: Tensor, layer: int, attn_impl: AttentionImplementation) -> Tensor:
        before, after, value = x_BTE.chunk(3, dim=-1)
        return after * attn_impl.short_conv(layer, before * value, self.kernel_DL, self.bias_D)


class CrossAttention(nn.Module):
    """Queries of the decoder, keys and values of the encoder, which are computed once a source."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._head_size = config.head_size
        width = config.num_heads * config.head_size
        kv_width = config.num_kv_heads * config.head_size
        self.query = nn.Linear(config.d_model, width, bias=config.qkv_bias)
        self.key_value = nn.Linear(config.d_model, 2 * kv_width, bias=config.qkv_bias)
        self.out = nn.Linear(width, config.d_model, bias=config.attention_out_bias)

    def source_key_value(self, memory_BSD: Tensor) -> KeyValue:
        k_BSE, v_BSE = self.key_value(memory_BSD).chunk(2, dim=-1)
        return KeyValue(split_heads(k_BSE, self._head_size), split_heads(v_BSE, self._head_size))

    def forward(self, x_BTD: Tensor, layer: int, attn_impl: AttentionImplementation) -> Tensor:
        y_BTD: Tensor = self.out(attn_impl.cross_attention(layer, self.query(x_BTD)))
        return y_BTD


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
GATED = {"swiglu": "silu", "geglu": "gelu_tanh"}  # the activation of the gate


class SoftCap(nn.Module):
    """Logit soft-capping as a module."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self._cap = cap

    def forward(self, x: Tensor) -> Tensor:
        return soft_capped(x, self._cap)


class FeedForward(nn.Module):
    """Up projection, activation, down projection. A gate and its value share one projection."""

    def __init__(self, config: ModelConfig, d_ff: int | None = None) -> None:
        super().__init__()
        d_ff = d_ff or config.d_ff
        self._gated = config.activation in GATED
        self._activation = ACTIVATIONS[GATED.get(config.activation, config.activation)]
        width = d_ff * (2 if self._gated else 1)
        self.up = nn.Linear(config.d_model, width, bias=config.ff_bias)
        self.down = nn.Linear(d_ff, config.d_model, bias=config.ff_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTF = self.up(x_BTD)
        if self._gated:
            gate_BTF, value_BTF = h_BTF.chunk(2, dim=-1)
            h_BTF = self._activation(gate_BTF) * value_BTF
        else:
            h_BTF = self._activation(h_BTF)
        y_BTD: Tensor = self.down(h_BTF)
        return y_BTD


class MaskedHead(nn.Module):
    """An encoder's head before the vocabulary projection: dense, activation, norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.d_model, config.d_model, bias=config.ff_bias)
        self._activation = ACTIVATIONS[
            "silu" if config.activation == "swiglu" else config.activation
        ]
        self.norm = make_norm(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD: Tensor = self.norm(self._activation(self.dense(x_BTD)))
        return y_BTD


class ClassHead(nn.Module):
    """The logits of classes, of a text's first hidden state: dense, activation, dense."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.d_model, config.d_model)
        self._activation = torch.tanh if config.class_activation == "tanh" else F.relu
        self.out = nn.Linear(config.d_model, config.num_classes)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTC: Tensor = self.out(self._activation(self.dense(x_BTD)))
        return y_BTC


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward; or modules in the place of either."""

    def __init__(
        self,
        config: ModelConfig,
        attention: nn.Module | None = None,
        feed_forward: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.attention = attention or SelfAttention(config)
        self.attention_residual = Residual(config)
        self.feed_forward = feed_forward or FeedForward(config)
        self.feed_forward_residual = Residual(config)

    def forward(self, x_BTD: Tensor, layer: int, attn_impl: AttentionImplementation) -> Tensor:
        x_BTD = self.attention_residual(x_BTD, lambda x: self.attention(x, layer, attn_impl))
        y_BTD: Tensor = self.feed_forward_residual(x_BTD, self.feed_forward)
        return y_BTD


class DecoderLayer(EncoderLayer):
    """An encoder layer that may also have cross-attention between its two halves."""

    def __init__(
        self,
        config: ModelConfig,
        attention: nn.Module | None = None,
        feed_forward: nn.Module | None = None,
    ) -> None:
        super().__init__(config, attention, feed_forward)
        self._is_parallel = config.parallel_residual
        self.cross: CrossAttention | None = None
        if config.family == "seq2seq":
            self.cross = CrossAttention(config)
            self.cross_residual = Residual(config)

    def forward(self, x_BTD: Tensor, layer: int, attn_impl: AttentionImplementation) -> Tensor:
        before_BTD = x_BTD
        x_BTD = self.attention_residual(x_BTD, lambda x: self.attention(x, layer, attn_impl))
        if self._is_parallel:
            return x_BTD + cast(
                Tensor, self.feed_forward(self.feed_forward_residual.norm(before_BTD))
            )
        if self.cross is not None:
            cross = self.cross
            x_BTD = self.cross_residual(x_BTD, lambda x: cross(x, layer, attn_impl))
        y_BTD: Tensor = self.feed_forward_residual(x_BTD, self.feed_forward)
        return y_BTD
