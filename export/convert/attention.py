"""Attention as ONNX's own operator, over a batch with padding, with past and present keys.

Knows: Attention of opset 23, its inputs. Does not know: layers, graphs, files.

Each class is an `AttentionImplementation` (model/network/attention.py). It computes nothing: it
emits operators into the graph that torch.onnx is tracing.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quill.model.network.attention import (
    KeyValue,
    as_state,
    from_state,
    merge_heads,
    relative_bias,
    split_heads,
)
from quill.model.network.config import ModelConfig
from quill.model.network.positions import RotaryTables, tables_of

# B batch · T new tokens · P past tokens · S = P + T · N query heads · K key/value heads
# H head size · E heads x head size, flat · F frequencies

OPSET = 23  # the first with Attention


class StandardAttention:
    """Attention of new tokens to those that `mask_BS` has, before them and among them. Without
    `pasts` it is an encoder's: a token sees those behind it as well."""

    def __init__(
        self,
        config: ModelConfig,
        rotary: RotaryTables | None,
        mask_BS: Tensor,
        positions_BT: Tensor,
        pasts: Sequence[KeyValue] | None = None,
        cross: Sequence[KeyValue] = (),
        cross_mask_BS: Tensor | None = None,
        bias_NR: Tensor | None = None,
    ) -> None:
        self._config = config
        self._bias_NR = bias_NR
        self._positions_BT = positions_BT
        self._rotary = None if rotary is None else _gathered(rotary, positions_BT)
        self._mask_BS = mask_BS
        self._pasts = pasts
        self._cross = cross
        self._cross_mask_BS = cross_mask_BS
        self._masks: dict[int, Tensor] = {}
        self.presents: list[KeyValue] = []

    def begin(self, ids_BT: Tensor) -> Tensor:
        return self._positions_BT

    def self_attention(self, layer: int, qkv_BTE: Tensor, sinks_N: Tensor | None = None) -> Tensor:
        q_BNTH, new = self._heads(layer, qkv_BTE)
        past = None if self._pasts is None else self._pasts[layer]
        window = self._config.window_of(layer)
        if window not in self._masks:
            self._masks[window] = self._mask(qkv_BTE.shape[1], window)
        mask_B1TS = self._masks[window]
        if sinks_N is not None:
            whole = self._append(layer, new)
            mask = _mask_with_sinks(mask_B1TS, sinks_N)
            return _attend(self._config, q_BNTH, _with_sink(whole), mask)[0]
        out_BTE, present = _attend(self._config, q_BNTH, new, mask_B1TS, past)
        self.presents += [] if present is None else [present]
        return out_BTE

    def short_conv(
        self, layer: int, x_BTD: Tensor, kernel_D1L: Tensor, bias_D: Tensor | None
    ) -> Tensor:
        """As `causal_conv` of model/network/attention.py."""
        x_BDS = from_state(self._append(layer, as_state(x_BTD))).mT
        padded_BDS = F.pad(x_BDS, (kernel_D1L.shape[-1] - 1, 0))
        y_BDS = F.conv1d(padded_BDS, kernel_D1L, bias_D, groups=len(kernel_D1L))
        return y_BDS.mT[:, -x_BTD.shape[1] :]

    def _append(self, layer: int, new: KeyValue) -> KeyValue:
        assert self._pasts is not None
        sides = zip(self._pasts[layer], new, strict=True)
        present = KeyValue(*(torch.cat(each, dim=2) for each in sides))
        self.presents.append(present)
        return present

    def cross_attention(self, layer: int, q_BTE: Tensor) -> Tensor:
        assert self._cross_mask_BS is not None
        q_BNTH = split_heads(q_BTE, self._config.head_size)
        mask_B11S = self._cross_mask_BS.bool()[:, None, None, :]
        mask_B1TS = mask_B11S.expand(-1, -1, q_BTE.shape[1], -1)
        return _attend(self._config, q_BNTH, self._cross[layer], mask_B1TS)[0]

    def _heads(self, layer: int, qkv_BTE: Tensor) -> tuple[Tensor, KeyValue]:
        """As `split_qkv` of model/network/attention.py, with positions of each sequence's own."""
        num_heads, (num_kv_heads, key_size, value_size) = (
            self._config.num_heads,
            self._config.cached,
        )
        widths = [(num_heads + num_kv_heads) * key_size, num_kv_heads * value_size]
        qk_BTE, v_BTE = torch.split(qkv_BTE, widths, dim=-1)
        qk_BNTH, v_BKTH = split_heads(qk_BTE, key_size), split_heads(v_BTE, value_size)
        if (tables := tables_of(self._rotary, self._config, layer)) is not None:
            plain = key_size - self._config.rotary_size
            turned = _turned(qk_BNTH[..., plain:], tables)
            qk_BNTH = torch.cat((qk_BNTH[..., :plain], turned), dim=-1) if plain else turned
        q_BNTH, k_BKTH = torch.split(qk_BNTH, [num_heads, num_kv_heads], dim=1)
        return q_BNTH, KeyValue(k_BKTH, v_BKTH)

    def _mask(self, num_new: int, window: int) -> Tensor:
        """Where a token may attend, or what is added to scores. Padding sees itself: an empty sum
        would be a NaN."""
        num_keys = self._mask_BS.shape[1]
        key_S = torch.arange(num_keys)
        query_T1 = (torch.arange(num_new) + (num_keys - num_new)).unsqueeze(1)
        seen_B1S = self._mask_BS.bool().unsqueeze(1)
        if self._pasts is not None:
            seen_B1S = seen_B1S & (key_S <= query_T1)
        if window:
            seen_B1S = seen_B1S & (key_S > query_T1 - window)
        seen_B1TS = (seen_B1S | (key_S == query_T1)).unsqueeze(1)
        if self._bias_NR is None:
            return seen_B1TS
        bias_NTS = relative_bias(self._bias_NR, num_new, num_keys, self._config.context)
        return torch.where(seen_B1TS, bias_NTS, -torch.inf)


def _with_sink(whole: KeyValue) -> KeyValue:
    """One more key, whose score is the mask's, and whose value is zero."""
    return KeyValue(*(F.pad(side, (0, 0, 0, 1)) for side in whole))


def _mask_with_sinks(mask_B1TS: Tensor, sinks_N: Tensor) -> Tensor:
    """What is added to scores."""
    zero = torch.zeros((), dtype=sinks_N.dtype)
    added_B1TS = torch.where(mask_B1TS, zero, torch.full_like(zero, -torch.inf))
    added_BNTS = added_B1TS.expand(-1, len(sinks_N), -1, -1)
    sinks_BNT1 = sinks_N[None, :, None, None].expand(*added_BNTS.shape[:3], 1)
    return torch.cat((added_BNTS, sinks_BNT1), dim=-1)


def _gathered(tables: RotaryTables, positions_BT: Tensor) -> RotaryTables:
    cos, sin = (F.embedding(positions_BT, each).unsqueeze(1) for each in tables[:2])
    local = None if tables.local is None else _gathered(tables.local, positions_BT)
    return RotaryTables(cos, sin, local)


def _turned(x_BNTH: Tensor, tables: RotaryTables) -> Tensor:
    left, right = x_BNTH.chunk(2, dim=-1)
    cos_B1TF, sin_B1TF = tables.cos_PF, tables.sin_PF
    return torch.cat(
        (left * cos_B1TF - right * sin_B1TF, right * cos_B1TF + left * sin_B1TF), dim=-1
    )


def _attend(
    config: ModelConfig,
    q_BNTH: Tensor,
    new: KeyValue,
    mask_B1TS: Tensor,
    past: KeyValue | None = None,
) -> tuple[Tensor, KeyValue | None]:
    """Emits the operator. Returns its output, and present keys and values if it has past ones."""
    attributes: dict[str, float] = {"scale": config.scale}
    if config.attention_soft_cap:
        attributes["softcap"] = config.attention_soft_cap
    shapes: list[list[int | torch.SymInt]] = [[*q_BNTH.shape[:3], new.v_BKSH.shape[3]]]
    if past is not None:
        for before, side in zip(past, new, strict=True):
            shapes.append([*side.shape[:2], before.shape[2] + side.shape[2], side.shape[3]])
    outputs: Sequence[Tensor] = torch.onnx.ops.symbolic_multi_out(
        "Attention",
        [q_BNTH, *new, mask_B1TS, *(past or ())],
        attrs={**attributes},
        dtypes=[q_BNTH.dtype] * len(shapes),
        shapes=shapes,
        version=OPSET,
    )
    present = None if past is None else KeyValue(outputs[1], outputs[2])
    return merge_heads(outputs[0]), present
