"""com.microsoft::PagedAttention as its schema describes it, in plain numpy.

The runtime has kernels for cards only. With this, a graph for cards can be evaluated without one.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from onnx.reference.op_run import OpRun

# S sequences · T new tokens of all · N blocks · P positions of a block · K key/value heads
# H head size · F = H / 2 frequencies

Array = npt.NDArray[Any]


def rotated(x_TKH: Array, cos_TF: Array, sin_TF: Array) -> Array:
    """The halves of a head are the two sides of each pair: not interleaved."""
    left, right = np.split(x_TKH.astype(np.float32), 2, axis=-1)
    cos, sin = cos_TF[:, None].astype(np.float32), sin_TF[:, None].astype(np.float32)
    turned: Array = np.concatenate((left * cos - right * sin, right * cos + left * sin), axis=-1)
    return turned


def attend(q_TNH: Array, k_SKH: Array, v_SKH: Array, scale: float) -> Array:
    """The last query sees all keys, the one before it all but one, and so on."""
    group = q_TNH.shape[1] // k_SKH.shape[1]
    k_SNH, v_SNH = np.repeat(k_SKH, group, axis=1), np.repeat(v_SKH, group, axis=1)
    scores_NTS = np.einsum("tnh,snh->nts", q_TNH, k_SNH) * scale
    num_new, num_keys = scores_NTS.shape[1:]
    future_TS = ~np.tri(num_new, num_keys, num_keys - num_new, dtype=bool)
    scores_NTS[:, future_TS] = -np.inf
    weights_NTS = np.exp(scores_NTS - scores_NTS.max(axis=-1, keepdims=True))
    weights_NTS /= weights_NTS.sum(axis=-1, keepdims=True)
    found: Array = np.einsum("nts,snh->tnh", weights_NTS, v_SNH)
    return found


def paged_attention(
    qkv: Array,
    key_cache_NPKH: Array,
    value_cache_NPKH: Array,
    starts: Array,
    past: Array,
    table: Array,
    cos: Array | None = None,
    sin: Array | None = None,
    *,
    num_heads: int,
    scale: float,
) -> tuple[Array, Array, Array]:
    """Packed queries, keys and values in; what was found, and both caches, out."""
    size, kv_heads = key_cache_NPKH.shape[3], key_cache_NPKH.shape[2]
    key_cache_NPKH, value_cache_NPKH = key_cache_NPKH.copy(), value_cache_NPKH.copy()
    heads = qkv.reshape(len(qkv), -1, size).astype(np.float32)
    out = np.zeros((len(qkv), num_heads * size), qkv.dtype)
    for row, blocks in enumerate(table):
        new = slice(starts[row], starts[row + 1])
        positions = np.arange(past[row], past[row] + new.stop - new.start)
        q, k, v = np.split(heads[new], [num_heads, num_heads + kv_heads], axis=1)
        if cos is not None and sin is not None:
            q, k = (rotated(x, cos[positions], sin[positions]) for x in (q, k))
        block_size = key_cache_NPKH.shape[1]
        at = blocks[positions // block_size], positions % block_size
        key_cache_NPKH[at], value_cache_NPKH[at] = k, v
        length = int(past[row]) + len(positions)
        keys, values = (
            cache[blocks].reshape(-1, kv_heads, size)[:length].astype(np.float32)
            for cache in (key_cache_NPKH, value_cache_NPKH)
        )
        out[new] = attend(q, keys, values, scale).reshape(len(positions), -1)
    return out, key_cache_NPKH, value_cache_NPKH


class PagedAttention(OpRun):
    """The node, for onnx's reference evaluator."""

    op_domain = "com.microsoft"

    def _run(  # type: ignore[no-untyped-def]
        self,
        query,
        key,
        value,
        *inputs,
        num_heads=None,
        kv_num_heads=None,
        do_rotary=0,
        scale=None,
    ):
        assert key is None
        assert value is None
        assert inputs[0].shape[2] == kv_num_heads
        assert len(inputs) == (7 if do_rotary else 5)
        return paged_attention(query, *inputs, num_heads=num_heads, scale=scale)
