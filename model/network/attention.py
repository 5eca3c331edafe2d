"""Attention: the textbook formula, and the implementations that a forward pass chooses from.

Knows: masks, heads, rotary positions, the KV cache.
Does not know: projections, layers.

A network's layers compute queries, keys and values and call an `AttentionImplementation`. Training
uses one without a cache, decoding one with a KV cache, and export one that emits ONNX operators:
the network itself is written once.
"""

import math
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quill.model.network.config import STATE_SIZE, ModelConfig
from quill.model.network.positions import RotaryTables, rotate, tables_of

# B batch · T new tokens · S tokens attended to · N query heads · K key/value heads · H head size
# E = heads x head size, flat


class KeyValue(NamedTuple):
    """One layer's keys and values."""

    k_BKSH: Tensor
    v_BKSH: Tensor

    def reordered(self, order_B: Tensor) -> "KeyValue":
        return KeyValue(self.k_BKSH[order_B], self.v_BKSH[order_B])


class CrossKeyValue(NamedTuple):
    """The source's keys and values for each decoder layer, and which aren't padding."""

    layers: list[KeyValue]
    mask_BS: Tensor

    def reordered(self, order_B: Tensor) -> "CrossKeyValue":
        layers = [layer.reordered(order_B) for layer in self.layers]
        return CrossKeyValue(layers, self.mask_BS[order_B])


class AttentionImplementation(Protocol):
    """Computes the attention of one forward pass."""

    def begin(self, ids_BT: Tensor) -> Tensor:
        """Begins a forward pass; returns the position of each new token, as (T,) or (B, T)."""

    def self_attention(self, layer: int, qkv_BTE: Tensor, sinks_N: Tensor | None = None) -> Tensor:
        """Attends from the new tokens to themselves and to what came before them. `sinks_N`: of
        each head a score that has a weight and no value."""

    def cross_attention(self, layer: int, q_BTE: Tensor) -> Tensor:
        """Attends from the new tokens to the encoder's output."""

    def short_conv(
        self, layer: int, x_BTD: Tensor, kernel_DL: Tensor, bias_D: Tensor | None
    ) -> Tensor:
        """A causal convolution of each channel over the new tokens and what came before them."""


def causal_mask(num_queries: int, num_keys: int, window: int = 0) -> Tensor:
    """Zero where a query may attend, −∞ where the key is in its future, or before its window."""
    first = num_keys - num_queries  # the position of the first query
    allowed_TS = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(first)
    if window:
        allowed_TS = allowed_TS.triu(first - window + 1)
    return torch.zeros(num_queries, num_keys).masked_fill(~allowed_TS, -math.inf)


def relative_bias(bias_NR: Tensor, num_queries: int, num_keys: int, context: int) -> Tensor:
    """What is added to scores, (N, T, S), of a table by distance whose column context - 1 is of a
    query's own position. The last query's position is the last key's."""
    position_S = torch.arange(num_keys, device=bias_NR.device)
    distance_TS = position_S - position_S[num_keys - num_queries :, None]
    return bias_NR[:, (distance_TS + context - 1).clamp(max=bias_NR.shape[1] - 1)]


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """Logit soft-capping: numbers between -cap and cap."""
    return cap * torch.tanh(x / cap)


def attention_weights(
    q_BNTH: Tensor,
    k_BNSH: Tensor,
    mask_TS: Tensor | None = None,
    scale: float | None = None,
    soft_cap: float = 0.0,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """softmax(q·kᵀ / √d_k + mask): the textbook formula. A sink is one more score in its sum."""
    scores_BNTS = q_BNTH @ k_BNSH.transpose(-1, -2)
    scores_BNTS = (
        scores_BNTS / math.sqrt(q_BNTH.shape[-1]) if scale is None else scores_BNTS * scale
    )
    if soft_cap:
        scores_BNTS = soft_capped(scores_BNTS, soft_cap)
    if mask_TS is not None:
        scores_BNTS = scores_BNTS + mask_TS
    if sinks_N is None:
        return scores_BNTS.softmax(dim=-1)
    sinks_BNT1 = sinks_N[:, None, None].expand(*scores_BNTS.shape[:-1], 1)
    return torch.cat((scores_BNTS, sinks_BNT1), dim=-1).softmax(dim=-1)[..., :-1]


def split_heads(x_BTE: Tensor, head_size: int) -> Tensor:
    """(B, T, heads x H) becomes (B, heads, T, H)."""
    return x_BTE.reshape(*x_BTE.shape[:-1], -1, head_size).transpose(1, 2)


def merge_heads(x_BNTH: Tensor) -> Tensor:
    """(B, heads, T, H) becomes (B, T, heads x H)."""
    return x_BNTH.transpose(1, 2).flatten(2)


class QueryKeyValue(NamedTuple):
    """The queries, keys and values of new tokens, as heads."""

    q_BNTH: Tensor
    kv: KeyValue


def split_qkv(
    qkv_BTE: Tensor, config: ModelConfig, rotary: RotaryTables | None, first_position: int
) -> QueryKeyValue:
    """Splits the fused projection and applies rotary positions to queries and keys."""
    num_heads, (num_kv_heads, key_size, value_size) = config.num_heads, config.cached
    width, kv_width = (num_heads + num_kv_heads) * key_size, num_kv_heads * value_size
    qk_BTE, v_BTE = torch.split(qkv_BTE, [width, kv_width], dim=-1)
    qk_BNTH, v_BKTH = split_heads(qk_BTE, key_size), split_heads(v_BTE, value_size)
    if rotary is not None and config.rotary_size == key_size:
        qk_BNTH = rotate(qk_BNTH, rotary, first_position)
    elif rotary is not None:
        sizes = [key_size - config.rotary_size, config.rotary_size]
        plain, rotated = torch.split(qk_BNTH, sizes, dim=-1)
        qk_BNTH = torch.cat((plain, rotate(rotated, rotary, first_position)), dim=-1)
    q_BNTH, k_BKTH = torch.split(qk_BNTH, [num_heads, num_kv_heads], dim=1)
    return QueryKeyValue(q_BNTH, KeyValue(k_BKTH, v_BKTH))


def repeat_groups(x_BKSH: Tensor, num_heads: int) -> Tensor:
    """Repeats each K/V head for the query heads that share it."""
    groups = num_heads // x_BKSH.shape[1]
    return x_BKSH if groups == 1 else x_BKSH.repeat_interleave(groups, dim=1)


def _attend(
    q_BNTH: Tensor,
    kv: KeyValue,
    mask: Tensor | None = None,
    causal: bool = False,
    config: ModelConfig | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """`config`: for its scale and soft cap."""
    num_heads = q_BNTH.shape[1]
    k_BNSH, v_BNSH = (repeat_groups(side, num_heads) for side in kv)
    scale = None if config is None else config.scale
    cap = 0.0 if config is None else config.attention_soft_cap
    if cap or sinks_N is not None:
        assert mask is not None, "soft caps and sinks need an explicit mask"
        return merge_heads(attention_weights(q_BNTH, k_BNSH, mask, scale, cap, sinks_N) @ v_BNSH)
    # PyTorch's fast kernel needs keys and values of the same width.
    missing = k_BNSH.shape[-1] - v_BNSH.shape[-1]
    out_BNTH = F.scaled_dot_product_attention(
        q_BNTH,
        k_BNSH,
        F.pad(v_BNSH, (0, missing)) if missing else v_BNSH,
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
    )
    return merge_heads(out_BNTH[..., :-missing] if missing else out_BNTH)


def attend_to_past(
    config: ModelConfig,
    layer: int,
    q_BNTH: Tensor,
    kv: KeyValue,
    sinks_N: Tensor | None = None,
    bias_NR: Tensor | None = None,
    *,
    from_start: bool = False,
) -> Tensor:
    """Causal attention. `from_start`: there are no keys before the queries' tokens."""
    window = config.window_of(layer)
    plain = not config.attention_soft_cap and sinks_N is None and bias_NR is None
    if from_start and not window and plain:
        return _attend(q_BNTH, kv, causal=True, config=config)
    num_queries, num_keys = q_BNTH.shape[2], kv.k_BKSH.shape[2]
    mask = causal_mask(num_queries, num_keys, window).to(q_BNTH)
    if bias_NR is not None:
        mask = mask + relative_bias(bias_NR, num_queries, num_keys, config.context)
    return _attend(q_BNTH, kv, mask=mask, config=config, sinks_N=sinks_N)


def causal_conv(x_BSD: Tensor, num_new: int, kernel_DL: Tensor, bias_D: Tensor | None) -> Tensor:
    """The last `num_new` outputs. Before the first token there are noughts."""
    padded_BDS = F.pad(x_BSD.mT, (kernel_DL.shape[1] - 1, 0))
    y_BDS = F.conv1d(padded_BDS, kernel_DL.unsqueeze(1), bias_D, groups=len(kernel_DL))
    return y_BDS.mT[:, -num_new:]


def as_state(x_BTD: Tensor) -> KeyValue:
    """A convolution's inputs as they are cached: half of the channels as keys."""
    first, second = x_BTD.chunk(2, dim=-1)
    return KeyValue(split_heads(first, STATE_SIZE), split_heads(second, STATE_SIZE))


def from_state(state: KeyValue) -> Tensor:
    return torch.cat([merge_heads(side) for side in state], dim=-1)


class EncoderAttention:
    """Bidirectional: every token attends to every token that isn't padding."""

    def __init__(
        self,
        config: ModelConfig,
        rotary: RotaryTables | None,
        mask_BS: Tensor | None,
        bias_NR: Tensor | None = None,
    ) -> None:
        self._config = config
        self._rotary = rotary
        self._bias_NR = bias_NR
        self._mask_B11S = None if mask_BS is None else mask_BS[:, None, None, :]

    def begin(self, ids_BT: Tensor) -> Tensor:
        return torch.arange(ids_BT.shape[1], device=ids_BT.device)

    def self_attention(self, layer: int, qkv_BTE: Tensor, sinks_N: Tensor | None = None) -> Tensor:
        q_BNTH, kv = split_qkv(qkv_BTE, self._config, self._rotary, 0)
        mask = self._mask_B11S
        if self._bias_NR is not None:
            length = qkv_BTE.shape[1]
            bias_NTS = relative_bias(self._bias_NR, length, length, self._config.context)
            mask = bias_NTS if mask is None else bias_NTS.masked_fill(~mask, -math.inf)
        return _attend(q_BNTH, kv, mask=mask, config=self._config)

    def cross_attention(self, layer: int, q_BTE: Tensor) -> Tensor:
        raise AssertionError("an encoder has no cross-attention")

    def short_conv(
        self, layer: int, x_BTD: Tensor, kernel_DL: Tensor, bias_D: Tensor | None
    ) -> Tensor:
        raise AssertionError("an encoder has no short convolutions")


class UncachedAttention:
    """Causal attention of whole sequences, without a cache: training and scoring."""

    def __init__(
        self,
        config: ModelConfig,
        rotary: RotaryTables | None,
        cross: CrossKeyValue | None = None,
        bias_NR: Tensor | None = None,
    ) -> None:
        self._config = config
        self._rotary = rotary
        self._cross = cross
        self._bias_NR = bias_NR

    def begin(self, ids_BT: Tensor) -> Tensor:
        return torch.arange(ids_BT.shape[1], device=ids_BT.device)

    def self_attention(self, layer: int, qkv_BTE: Tensor, sinks_N: Tensor | None = None) -> Tensor:
        rotary = tables_of(self._rotary, self._config, layer)
        q_BNTH, kv = split_qkv(qkv_BTE, self._config, rotary, 0)
        return attend_to_past(
            self._config, layer, q_BNTH, kv, sinks_N, self._bias_NR, from_start=True
        )

    def cross_attention(self, layer: int, q_BTE: Tensor) -> Tensor:
        assert self._cross is not None, "a decoder with cross-attention needs an encoded source"
        return attend_across(q_BTE, self._cross, layer, self._config)

    def short_conv(
        self, layer: int, x_BTD: Tensor, kernel_DL: Tensor, bias_D: Tensor | None
    ) -> Tensor:
        return causal_conv(x_BTD, x_BTD.shape[1], kernel_DL, bias_D)


def attend_across(q_BTE: Tensor, cross: CrossKeyValue, layer: int, config: ModelConfig) -> Tensor:
    q_BNTH = split_heads(q_BTE, config.head_size)
    mask_B11S = cross.mask_BS[:, None, None, :]
    return _attend(q_BNTH, cross.layers[layer], mask=mask_B11S, config=config)


class CachedAttention(UncachedAttention):
    """Causal attention of new tokens to a growing KV cache: decoding.

    All sequences of the batch have the same length: the reference for faster implementations.
    """

    def __init__(
        self,
        config: ModelConfig,
        rotary: RotaryTables | None,
        cross: CrossKeyValue | None = None,
        bias_NR: Tensor | None = None,
    ) -> None:
        super().__init__(config, rotary, cross, bias_NR)
        self._layers: dict[int, KeyValue] = {}
        self._length = 0
        self._num_new = 0

    @property
    def length(self) -> int:
        """How many tokens the cache holds."""
        return self._length

    def key_value(self, layer: int) -> KeyValue:
        """One layer's cache after a pass, with the newest tokens."""
        return self._layers[layer]

    def begin(self, ids_BT: Tensor) -> Tensor:
        """New tokens come after those already cached."""
        self._length += self._num_new
        self._num_new = ids_BT.shape[1]
        return torch.arange(self._length, self._length + self._num_new, device=ids_BT.device)

    def self_attention(self, layer: int, qkv_BTE: Tensor, sinks_N: Tensor | None = None) -> Tensor:
        rotary = tables_of(self._rotary, self._config, layer)
        q_BNTH, new = split_qkv(qkv_BTE, self._config, rotary, self._length)
        kv = self._append(layer, new)
        return attend_to_past(self._config, layer, q_BNTH, kv, sinks_N, self._bias_NR)

    def short_conv(
        self, layer: int, x_BTD: Tensor, kernel_DL: Tensor, bias_D: Tensor | None
    ) -> Tensor:
        x_BSD = from_state(self._append(layer, as_state(x_BTD)))
        return causal_conv(x_BSD, x_BTD.shape[1], kernel_DL, bias_D)

    def _append(self, layer: int, new: KeyValue) -> KeyValue:
        past = self._layers.get(layer)
        if past is not None:
            new = KeyValue(
                torch.cat((past.k_BKSH, new.k_BKSH), dim=2),
                torch.cat((past.v_BKSH, new.v_BKSH), dim=2),
            )
        self._layers[layer] = new
        return new

    def reorder(self, order_B: Tensor) -> None:
        """Reorders the cache's batch: beam search does so when beams change places."""
        self._layers = {layer: kv.reordered(order_B) for layer, kv in self._layers.items()}
        if self._cross is not None:
            self._cross = self._cross.reordered(order_B)
