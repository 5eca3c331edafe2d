"""Attention as ONNX Runtime has it: one operator with the key/value cache inside.

Knows: com.microsoft::GroupQueryAttention, its inputs and its rules.
Does not know: layers, precisions, files.

The network hands its queries, keys and values to an `Attending` (model/network/attention.py). This
one computes nothing: it writes the operator into the graph that torch.onnx is tracing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quill.model.network.attention import KeyValue
from quill.model.network.config import ModelConfig
from quill.model.network.positions import RotaryTables

# R rows · T new tokens · K key/value heads · C capacity · H head size · E heads x head size

OPERATOR = "com.microsoft::GroupQueryAttention"


@dataclass
class Cache:
    """The keys and values of all layers, and how many of them are real in each row."""

    past: Sequence[KeyValue]  # (R, K, C, H) each
    seqlens_R: Tensor  # int32: the length of each row, less 1
    total_length: Tensor  # int32 scalar: the longest row's length
    present: list[KeyValue] = field(default_factory=list)  # what the operators give back


# The sizes of heads that Quill's own attention has kernels for (export/operators/kernels/heads.h).
OWN_HEAD_SIZES = (16, 32, 64, 80, 96, 128)
OWN_OPERATOR = "quill::Attention"


class GroupQueryAttending:
    """New tokens against a cache that the operator extends in place."""

    def __init__(
        self,
        config: ModelConfig,
        rotary: RotaryTables | None,
        cache: Cache,
        cross: Cache | None = None,
    ) -> None:
        self._config = config
        self._rotary = rotary
        self._cache = cache
        self._cross = cross

    def begin(self, ids_RT: Tensor) -> Tensor:
        """A row's new tokens are the last T of its length."""
        num_new = ids_RT.shape[1]
        first_R1 = self._cache.seqlens_R.to(torch.int64).unsqueeze(1) + (1 - num_new)
        return first_R1 + torch.arange(num_new)

    def self_attention(self, layer: int, qkv_RTE: Tensor) -> Tensor:
        """Packed input: queries, keys and values side by side, as the projection made them."""
        tables = () if self._rotary is None else (self._rotary.cos_PF, self._rotary.sin_PF)
        return self._attend(layer, (qkv_RTE, None, None), self._cache, tables)

    def cross_attention(self, layer: int, q_RTE: Tensor) -> Tensor:
        """No new keys: what the encoder parked is the whole past. One query token at a time."""
        assert self._cross is not None, "a decoder with cross-attention needs parked keys"
        width = self._config.num_kv_heads * self._config.head_size
        none_R0E = q_RTE.new_zeros((q_RTE.shape[0], 0, width))
        return self._attend(layer, (q_RTE, none_R0E, none_R0E), self._cross, ())

    def _attend(
        self,
        layer: int,
        qkv: tuple[Tensor, Tensor | None, Tensor | None],
        cache: Cache,
        rotary: Sequence[Tensor],
    ) -> Tensor:
        config = self._config
        attributes = {
            "num_heads": config.num_heads,
            "kv_num_heads": config.num_kv_heads,
            "do_rotary": int(bool(rotary)),
            "scale": config.head_size**-0.5,
        }
        cached = (*cache.past[layer], cache.seqlens_R, cache.total_length)
        return self._write(OPERATOR, layer, cache, [*qkv, *cached, *rotary], attributes)

    def _write(
        self,
        operator: str,
        layer: int,
        cache: Cache,
        inputs: Sequence[Tensor | None],
        attributes: Mapping[str, int | float],
    ) -> Tensor:
        """The operator into the graph, which answers what was found and the extended cache."""
        x_RTE, past = inputs[0], cache.past[layer]
        assert x_RTE is not None
        out_RTE, *present = torch.onnx.ops.symbolic_multi_out(
            operator,
            inputs,
            attrs={**attributes},
            dtypes=[x_RTE.dtype, past.k_BKSH.dtype, past.v_BKSH.dtype],
            shapes=[
                [*x_RTE.shape[:2], self._config.num_heads * self._config.head_size],
                list(past.k_BKSH.shape),
                list(past.v_BKSH.shape),
            ],
            version=1,
        )
        assert len(cache.present) == layer, "layers attend in order, each once"
        cache.present.append(KeyValue(*present))
        return out_RTE


class OwnAttending(GroupQueryAttending):
    """Looks at what came before with Quill's own operator, which keeps it in halves."""

    def self_attention(self, layer: int, qkv_RTE: Tensor) -> Tensor:
        config, cache = self._config, self._cache
        attributes = {
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_size": config.head_size,
            "scale": config.head_size**-0.5,
        }
        tables = (None, None) if self._rotary is None else self._rotary
        cached = (*cache.past[layer], cache.seqlens_R, cache.total_length)
        return self._write(OWN_OPERATOR, layer, cache, [qkv_RTE, *cached, *tables], attributes)
