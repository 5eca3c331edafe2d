"""Attention of one passage that keeps its keys and values, and may begin far from the start.

Knows: what is before such a passage. Does not know: layers, which passages there are.

The `past` positions before a passage repeat two blocks: the first 16 positions of the second
passage in the first half of the past, or wherever no window reaches, and then those of the first
passage. Equal keys have equal scores, so that a key that occurs n times is one key with log n added
to its score.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quill.model.network.attention import (
    CachedAttention,
    KeyValue,
    as_state,
    attention_weights,
    causal_conv,
    causal_mask,
    from_state,
    merge_heads,
    repeat_groups,
    split_qkv,
)
from quill.model.network.positions import tables_of

PAST_BLOCK = 16  # positions of the blocks that a past repeats


class ProbeAttention(CachedAttention):
    """`halves`: keys and values are rounded to float16. `earlier`: of the first two passages."""

    def __init__(
        self,
        config: Any,
        rotary: Any,
        past: int,
        halves: bool,
        earlier: "Sequence[ProbeAttention]",
    ) -> None:
        super().__init__(config, rotary)
        self._length, self._halves, self._earlier = past, halves, earlier[:2]

    def self_attention(self, layer: int, qkv_BTE: Tensor, sinks_N: Tensor | None = None) -> Tensor:
        config, past = self._config, self._length
        q_BNTH, new = split_qkv(qkv_BTE, config, tables_of(self._rotary, config, layer), past)
        if self._halves:
            new = KeyValue(*(side.half().float() for side in new))
        self._layers[layer] = new
        num_new, window = q_BNTH.shape[2], config.window_of(layer)
        mask = causal_mask(num_new, num_new, window)
        if past:
            blocks = [each.key_value(layer) for each in self._earlier]
            sides = [[side[:, :, :PAST_BLOCK] for side in block] for block in reversed(blocks)]
            new = KeyValue(*(torch.cat(each, dim=2) for each in zip(*sides, new, strict=True)))
            counts = past_counts(past, num_new, config.window, window)
            mask = torch.cat((torch.from_numpy(counts).log().float(), mask), dim=1)
        k_BNSH, v_BNSH = (repeat_groups(side, config.num_heads) for side in new)
        cap = config.attention_soft_cap
        weights = attention_weights(q_BNTH, k_BNSH, mask, config.scale, cap, sinks_N)
        return merge_heads(weights @ v_BNSH)

    def short_conv(
        self, layer: int, x_BTD: Tensor, kernel_DL: Tensor, bias_D: Tensor | None
    ) -> Tensor:
        past, num_new = self._length, x_BTD.shape[1]
        x_BTD = x_BTD.half().float() if self._halves else x_BTD
        self._layers[layer] = as_state(x_BTD)
        if past:
            last = self._earlier[int(past_split(past, self._config.window) == past)]
            before = KeyValue(*(side[:, :, :PAST_BLOCK] for side in last.key_value(layer)))
            x_BTD = torch.cat((from_state(before), x_BTD), dim=1)
        return causal_conv(x_BTD, num_new, kernel_DL, bias_D)


def past_split(past: int, window: int) -> int:
    """The number of positions of a past that repeat the second passage's block."""
    start = max(past - window, 0) if window else past // 2
    return -(-start // PAST_BLOCK) * PAST_BLOCK


def past_counts(past: int, num_new: int, split_window: int, window: int) -> npt.NDArray[np.float64]:
    """How often each new token sees each of the 32 positions that a past repeats."""
    places = np.arange(past)
    kind = places % PAST_BLOCK + PAST_BLOCK * (places >= past_split(past, split_window))
    counts = np.zeros((num_new, 2 * PAST_BLOCK))
    for token in range(num_new):
        first = max(0, past + token - window + 1) if window else 0
        counts[token] = np.bincount(kind[first:], minlength=2 * PAST_BLOCK)
    return counts
