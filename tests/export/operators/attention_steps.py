"""Steps of attention over blocks for tests: graphs of one operator, a pool, a slow reference.

Knows: the operators' inputs. Does not know: kernels. The reference is plain numpy, a query at a
time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from onnx import TensorProto

from quill.export.verify.runner import Array, open_session
from tests.export.operators.custom_kernels import save_operator

BLOCK = 16
MAX_POSITIONS = 640
CACHE_TYPES = {"float16": TensorProto.FLOAT16, "float32": TensorProto.FLOAT}
CACHES = ("key_cache", "value_cache")
STEP = ("query_starts", "past_lengths", "block_table")
SOURCES = ("query_starts", "source_lengths", "source_table")
TABLES = ("cosines", "sines")
INPUTS = {
    "Attention": (("qkv", *CACHES, *STEP), ("attended", *CACHES)),
    "CrossAttention": (("q", *CACHES, *SOURCES), ("attended",)),
    "EncoderAttention": (("qkv", "query_starts"), ("attended",)),
    "Store": (("keys", "values", *CACHES, "query_starts", "block_table"), CACHES),
}


@dataclass(frozen=True)
class Shape:
    num: int = 6
    num_kv: int = 2
    size: int = 64
    dtype: str = "float16"
    rotary: bool = True
    window: int = 0
    soft_cap: float = 0.0
    value_size: int = 0  # 0: as keys
    rotary_size: int = 0  # 0: all of a head
    has_sinks: bool = False
    bias: bool = False  # by distance

    @property
    def sinks(self) -> Array:
        return 2 * normal(self.num, seed=5)

    @property
    def width(self) -> int:
        """Of a token's queries, keys and values."""
        return (self.num + self.num_kv) * self.size + self.num_kv * self.of_values

    @property
    def of_values(self) -> int:
        return self.value_size or self.size

    @property
    def extras(self) -> dict[str, Any]:
        """Attributes that a graph has only if it needs them."""
        names = ("window", "soft_cap", "value_size", "rotary_size")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tables(size: int) -> tuple[Array, Array]:
    speeds = 100.0 ** (-np.arange(size // 2) / (size // 2))
    angles = np.arange(MAX_POSITIONS)[:, None] * speeds
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def save(directory: Path, shape: Shape, operator: str = "Attention", **changes: Any) -> Path:
    """A graph of one operator."""
    num_tables = changes.pop("num_tables", 2) if shape.rotary else 0
    attributes: dict[str, Any] = {"heads": shape.num, "kv_heads": shape.num_kv}
    inputs, outputs = INPUTS[operator]
    given_back = [f"new_{name}" if name in CACHES else name for name in outputs]
    if "qkv" not in inputs:
        num_tables = 0
    rotary = tables(shape.rotary_size or shape.size)
    constants = dict(zip(TABLES[:num_tables], rotary, strict=False))
    names = [*inputs, *constants]
    if shape.has_sinks:
        names += [""] * (2 - num_tables) + ["sinks"]
        constants["sinks"] = shape.sinks[: changes.pop("num_sinks", shape.num)]
    if shape.bias and "qkv" in inputs:
        num_before = {"Attention": 9, "EncoderAttention": 4}[operator]
        names += [""] * (num_before - len(names)) + ["bias"]
        constants["bias"] = biases(shape, operator == "Attention")
    attributes |= {"head_size": shape.size, "scale": shape.size**-0.5} | shape.extras | changes
    return save_operator(
        directory,
        operator,
        names,
        {name: _type(shape, name) for name in inputs},
        {name: _type(shape, name) for name in given_back},
        constants,
        attributes,
    )


def biases(shape: Shape, causal: bool) -> Array:
    """Of each head, by distance; a causal token's own is the last."""
    both = normal(shape.num, 2 * MAX_POSITIONS - 1, seed=77)
    return both[:, :MAX_POSITIONS].copy() if causal else both


def _type(shape: Shape, name: str) -> int:
    if name.removeprefix("new_") in CACHES:
        return CACHE_TYPES[shape.dtype]
    return TensorProto.INT32 if name in (*STEP, *SOURCES) else TensorProto.FLOAT


class Chunk(NamedTuple):
    """What a sequence has in a step: its tokens' heads, how long it was before, its blocks."""

    heads: Array
    length: int
    blocks: Sequence[int]


def starts(counts: Sequence[int]) -> Array:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def padded(blocks: Sequence[Sequence[int]]) -> Array:
    width = max(len(each) for each in blocks)
    return np.array([[*each, *[0] * (width - len(each))] for each in blocks], np.int32)


class Pool:
    """Blocks that begin as NaN: only what was written is finite."""

    def __init__(self, path: Path, shape: Shape, num_blocks: int, num_threads: int = 2) -> None:
        self.session = open_session(path, num_threads)
        kv = (num_blocks, shape.num_kv)
        self.keys = np.full((*kv, shape.size, BLOCK), np.nan, shape.dtype)
        self.values = np.full((*kv, BLOCK, shape.of_values), np.nan, shape.dtype)

    def feeds(self, chunks: Sequence[Chunk]) -> dict[str, Array]:
        """Of a step of Attention."""
        return {
            "qkv": np.concatenate([chunk.heads for chunk in chunks]),
            **dict(zip(CACHES, (self.keys, self.values), strict=True)),
            "query_starts": starts([len(chunk.heads) for chunk in chunks]),
            "past_lengths": np.array([chunk.length for chunk in chunks], np.int32),
            "block_table": padded([chunk.blocks for chunk in chunks]),
        }

    def run(self, feeds: Mapping[str, Array]) -> Array:
        out, self.keys, self.values = self.session.run(None, dict(feeds))
        assert isinstance(out, np.ndarray)
        return out

    def step(self, *chunks: Chunk) -> list[Array]:
        """What each chunk's tokens attended to."""
        out = self.run(self.feeds(chunks))
        return np.split(out, np.cumsum([len(chunk.heads) for chunk in chunks])[:-1])

    def kept(self, blocks: Sequence[int], length: int) -> tuple[Array, Array]:
        """A sequence's keys and values: positions x kv heads x size."""
        keys = self.keys[list(blocks)].transpose(0, 3, 1, 2)
        values = self.values[list(blocks)].transpose(0, 2, 1, 3)
        keys, values = (side.reshape(-1, *side.shape[2:]) for side in (keys, values))
        return keys[:length], values[:length]


def turned(heads: Array, positions: Array) -> Array:
    """Tokens x heads x size, turned to their positions."""
    cosines, sines = (table[positions][:, None] for table in tables(heads.shape[-1]))
    first, second = np.split(heads, 2, axis=-1)
    return np.concatenate(
        [first * cosines - second * sines, second * cosines + first * sines], axis=-1
    )


def expected(shape: Shape, q: Array, keys: Array, values: Array, causal: bool) -> Array:
    """Tokens x (heads x size). Causal: the last token sees all positions."""
    group, out = shape.num // shape.num_kv, []
    for index, token in enumerate(q.astype(np.float64)):
        seen = len(keys) - (len(q) - 1 - index if causal else 0)
        for head in range(shape.num):
            first = max(seen - shape.window, 0) if shape.window else 0
            k, v = (each[first:seen, head // group].astype(np.float64) for each in (keys, values))
            scores = k @ token[head] * shape.size**-0.5
            if shape.soft_cap:
                scores = shape.soft_cap * np.tanh(scores / shape.soft_cap)
            if shape.bias:
                here = seen - 1 if causal else index
                distances = np.arange(first, seen) - here + MAX_POSITIONS - 1
                scores = scores + biases(shape, causal)[head, distances]
            weights = np.exp(scores - scores.max())
            sink = np.exp(shape.sinks[head] - scores.max()) if shape.has_sinks else 0.0
            out.append(weights / (weights.sum() + sink) @ v)
    return np.array(out).reshape(len(q), -1)


def split_heads(shape: Shape, qkv: Array) -> tuple[Array, Array, Array]:
    width = (shape.num + shape.num_kv) * shape.size
    heads = qkv[:, :width].reshape(len(qkv), -1, shape.size)
    q, k = np.split(heads, [shape.num], axis=1)
    v = qkv[:, width:].reshape(len(qkv), -1, shape.of_values)
    if shape.rotary:
        positions, still = np.arange(len(qkv)), shape.size - (shape.rotary_size or shape.size)
        q, k = (
            np.concatenate([each[..., :still], turned(each[..., still:], positions)], axis=-1)
            for each in (q, k)
        )
    return q, k, v
