"""Operators with random inputs and attributes that fit each other.

Knows: the operators' inputs and attributes. Does not know: what they compute, graphs.
What a block table doesn't need is garbage. Operators of states are given heads that they must
reject, too: several, or with narrow values.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from quill.export.verify.runner import Array

IDS = (-1, -16, -(2**31), 2**31 - 1, 2**30, 2**20, 1, 2, 17, 100)
# Where a tensor comes from; the last three are computed in the graph, and can't be folded away.
Source = Literal["input", "constant", "default", "sliced", "copied", "empty"]


@dataclass
class Tensor:
    array: Array
    source: Source = "input"
    length: int = 0  # sliced: that much of the first dimension is left
    sizes: tuple[int, ...] = ()  # empty: one of them is 0, the others are any


@dataclass
class Case:
    operator: str
    attributes: dict[str, Any]
    inputs: dict[str, Tensor | None]  # in their order; None: it isn't there
    outputs: dict[str, str] = field(default_factory=lambda: {"y": "float32"})
    version: int = 2


class Maker:
    """Makes the parts that graphs of several operators have."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.numbers = np.random.default_rng(chance.getrandbits(32))

    def floats(self, *sizes: int) -> Array:
        return self.numbers.standard_normal(sizes).astype(np.float32)

    def constant(self, *sizes: int) -> Tensor:
        return Tensor(self.floats(*sizes), "constant")

    def records(self, num_bytes: int) -> Tensor:
        return Tensor(self.numbers.integers(0, 256, num_bytes, np.uint8), "constant")

    def maybe(self, tensor: Tensor) -> Tensor | None:
        return tensor if self.chance.random() < 0.5 else None

    def rows(self, width: int) -> Array:
        leading = [self.chance.randint(0, 7) for _ in range(self.chance.choice((1, 1, 2, 3)))]
        return self.floats(*leading, width)

    def heads(self, is_state: bool = False) -> dict[str, Any]:
        """Of states, too, sometimes with several heads or with narrow values."""
        chance, one = self.chance, is_state and self.chance.random() < 0.5
        num_kv, size = (1 if one else chance.choice((1, 1, 2, 3))), 16 * chance.randint(1, 5)
        heads: dict[str, Any] = {"heads": num_kv * (1 if one else chance.choice((1, 2, 3, 9)))}
        heads |= {"kv_heads": num_kv, "head_size": size, "scale": size**-0.5}
        if not one and chance.random() < 0.3:
            heads["value_size"] = 16 * chance.randint(1, size // 16)
        if chance.random() < 0.2:
            heads |= {"rotary_size": 2 * chance.randint(0, size // 2)}
        if chance.random() < 0.2:
            heads |= {"window": chance.choice((1, 5, 16, 130)), "soft_cap": 30.0}
        return heads

    def caches(self, heads: dict[str, Any], num_blocks: int, dtype: str) -> dict[str, Tensor]:
        num_kv, size, width = heads["kv_heads"], heads["head_size"], value_size(heads)
        keys, values = (num_blocks, num_kv, size, 16), (num_blocks, num_kv, 16, width)
        return {
            "key_cache": Tensor(self.floats(*keys).astype(dtype)),
            "value_cache": Tensor(self.floats(*values).astype(dtype)),
        }

    def sequences(
        self, num_blocks: int, causal: bool, counts: list[int] | None = None
    ) -> tuple[list[int], dict[str, Tensor]]:
        """How many tokens each has in the step; starts, lengths and a block table."""
        chance = self.chance
        if counts is None:
            most = chance.choice((1, 1, 3, 40))
            counts = [chance.randint(0, most) for _ in range(chance.randint(0, 5))]
        longest = chance.choice((1, 20, 40, 300))
        lengths = [chance.randint(0 if causal or not n else 1, longest) for n in counts]
        seen = [length + (n if causal else 0) for n, length in zip(counts, lengths, strict=True)]
        width = max([-(-each // 16) for each in seen], default=0) + chance.randint(0, 2)
        table = self.numbers.choice(np.array(IDS, np.int32), (len(counts), width))
        for row, each in zip(table, seen, strict=True):
            needed = -(-each // 16)
            row[:needed] = self.numbers.integers(0, num_blocks, needed)
        starts = np.array([0, *itertools.accumulate(counts)], np.int32)
        tensors = (starts, np.array(lengths, np.int32), table)
        names = ("query_starts", "lengths", "table")
        return counts, dict(zip(names, map(Tensor, tensors), strict=True))

    def rotary(self, heads: dict[str, Any], num_positions: int) -> dict[str, Tensor | None]:
        if self.chance.random() < 0.5:
            return {}
        half = heads.get("rotary_size", heads["head_size"]) // 2
        return {name: Tensor(self.floats(num_positions, half)) for name in ("cosines", "sines")}


def value_size(heads: dict[str, Any]) -> int:
    return int(heads.get("value_size", heads["head_size"]))


def linear(make: Maker) -> Case:
    chance = make.chance
    inputs, bits, halves = 32 * chance.randint(1, 4), chance.choice((4, 8)), chance.randint(0, 1)
    gated = chance.randint(0, 1)
    columns = 32 * chance.randint(1, 3) if gated else chance.randint(1, 70)
    head = 64 if bits == 8 or halves else 128
    num_bytes = -(-columns // 16) * (inputs // 32) * (head + 64 * bits)
    x, outputs = make.rows(inputs), columns // (1 + gated)
    tensors: dict[str, Tensor | None] = {"x": Tensor(x), "records": make.records(num_bytes)}
    tensors["gains"] = make.maybe(make.constant(inputs))
    tensors["residual"] = make.maybe(Tensor(make.floats(*x.shape[:-1], outputs)))
    tensors["bias"] = make.maybe(make.constant(outputs))
    attributes = {"inputs": inputs, "columns": columns, "bits": bits, "halves": halves}
    return Case("Linear", attributes | {"gated": gated, "epsilon": 1e-5}, tensors)


def embedding(make: Maker) -> Case:
    inputs, columns = 32 * make.chance.randint(1, 4), make.chance.randint(1, 70)
    records = make.records(-(-columns // 16) * (inputs // 32) * 576)
    ids = Tensor(make.numbers.integers(0, columns, make.rows(1).shape[:-1]))
    return Case("Embedding", {"inputs": inputs, "columns": columns}, {"x": ids, "records": records})


def experts(make: Maker) -> Case:
    chance = make.chance
    groups, of_group = chance.choice((1, 1, 2, 3)), chance.randint(1, 6)
    top, number, bits = chance.randint(1, groups), groups * of_group, chance.choice((4, 8, 32))
    width, inner = (32 * chance.randint(1, 2) for _ in range(2))
    halves = [chance.randint(0, 1) if bits != 32 else 0 for _ in range(2)]

    def size(inputs: int, columns: int, halved: int) -> int:
        head = 64 if bits == 8 or halved else 128
        block = 32 * 64 if bits == 32 else head + 64 * bits
        return number * (columns // 16) * (inputs // 32) * block

    attributes: dict[str, Any] = {"inputs": width, "d_expert": inner, "number": number}
    attributes |= {"groups": groups, "top_groups": top, "group_best": chance.randint(1, of_group)}
    attributes |= {"per_token": chance.randint(1, of_group * top), "bits": bits, "scale": 1.0}
    attributes |= {"normalize": chance.randint(0, 1), "sigmoid": chance.randint(0, 1)}
    attributes |= {"up_halves": halves[0], "down_halves": halves[1]}
    x = make.rows(width)
    tensors: dict[str, Tensor | None] = {"x": Tensor(x)}
    tensors["logits"] = Tensor(make.floats(*x.shape[:-1], number))
    tensors["up"] = make.records(size(width, 2 * inner, halves[0]))
    tensors["down"] = make.records(size(inner, width, halves[1]))
    tensors["balance"] = make.maybe(make.constant(number))
    return Case("Experts", attributes, tensors)


def head_linear(make: Maker) -> Case:
    heads, inputs, columns = (make.chance.randint(1, 3) for _ in range(3))
    x, records = make.rows(heads * inputs), make.records(heads * columns * inputs * 64)
    attributes = {"heads": heads, "inputs": inputs, "columns": 16 * columns}
    return Case("HeadLinear", attributes, {"x": Tensor(x), "records": records})


def attention(make: Maker) -> Case:
    heads, dtype = make.heads(), make.chance.choice(("float16", "float32"))
    counts, where = make.sequences(5, causal=True)
    width = heads["kv_heads"] * value_size(heads)
    width += (heads["heads"] + heads["kv_heads"]) * heads["head_size"]
    tensors: dict[str, Tensor | None] = {"qkv": Tensor(make.floats(sum(counts), width))}
    tensors |= make.caches(heads, 5, dtype) | where | make.rotary(heads, 350)
    outputs = {"y": "float32", "new_keys": dtype, "new_values": dtype}
    return Case("Attention", heads, tensors, outputs)


def cross_attention(make: Maker) -> Case:
    heads, dtype = make.heads(), make.chance.choice(("float16", "float32"))
    counts, where = make.sequences(5, causal=False)
    q = make.floats(sum(counts), heads["heads"] * heads["head_size"])
    return Case("CrossAttention", heads, {"q": Tensor(q), **make.caches(heads, 5, dtype), **where})


def encoder_attention(make: Maker) -> Case:
    case = attention(make)
    names = ("qkv", "query_starts", "cosines", "sines")
    tensors = {name: case.inputs[name] for name in names if name in case.inputs}
    return Case("EncoderAttention", case.attributes, tensors)


def store(make: Maker) -> Case:
    heads, dtype = make.heads(), make.chance.choice(("float16", "float32"))
    counts, where = make.sequences(5, causal=True)
    num, num_kv = sum(counts), heads["kv_heads"]
    tensors: dict[str, Tensor | None] = {
        "keys": Tensor(make.floats(num, num_kv * heads["head_size"])),
        "values": Tensor(make.floats(num, num_kv * value_size(heads))),
        **make.caches(heads, 5, dtype),
        **{name: where[name] for name in ("query_starts", "table")},
        "lengths": make.maybe(where["lengths"]),
    }
    return Case("Store", heads, tensors, {"new_keys": dtype, "new_values": dtype})


def _cell(make: Maker) -> tuple[dict[str, Any], int, int]:
    kind, size = make.chance.randrange(3), 16 * make.chance.randint(1, 5)
    return {"kind": kind, "size": size}, size, size * (1, 3, 4)[kind]


def update(make: Maker) -> Case:
    cell, size, gates = _cell(make)
    num = make.chance.choice((0, 1, 5, 20))
    widths = {"input": gates, "state": gates, "h": size, "c": size}
    tensors: dict[str, Tensor | None] = {
        name: Tensor(make.floats(num, width)) for name, width in widths.items()
    }
    return Case("Update", cell, tensors, {"new_h": "float32", "new_c": "float32"})


def recurrence(make: Maker) -> Case:
    cell, size, gates = _cell(make)
    counts, where = make.sequences(5, causal=True)
    tensors: dict[str, Tensor | None] = {"input": Tensor(make.floats(sum(counts), gates))}
    tensors |= {"weights": make.constant(size, gates), "bias": make.constant(gates)}
    tensors["query_starts"] = where["query_starts"]
    return Case("Recurrence", cell | {"backwards": make.chance.randint(0, 1)}, tensors)


def _one_each(make: Maker) -> list[int]:
    """As many tokens as sequences: one of each, or sometimes none of some."""
    num = make.chance.randint(0, 5)
    counts = [1] * num
    if num > 1 and make.chance.random() < 0.4:
        counts[0], counts[-1] = 0, 2
    return counts


def ends(make: Maker) -> Case:
    heads = make.heads(is_state=True)
    where = make.sequences(5, causal=False, counts=_one_each(make))[1]
    cache = make.caches(heads, 5, "float32")["value_cache"]
    return Case("Ends", heads, {"value_cache": cache, **where})


def recall(make: Maker) -> Case:
    heads = make.heads(is_state=True)
    counts, where = make.sequences(5, causal=True, counts=_one_each(make))
    tensors: dict[str, Tensor | None] = {
        "ends": Tensor(make.floats(sum(counts), heads["head_size"]))
    }
    tensors |= make.caches(heads, 5, "float32") | where
    return Case("Recall", heads, tensors, {"h": "float32", "c": "float32"})


def additive_attention(make: Maker) -> Case:
    heads = make.heads(is_state=True)
    counts, where = make.sequences(5, causal=False)
    size = heads["head_size"]
    tensors: dict[str, Tensor | None] = {"q": Tensor(make.floats(sum(counts), size))}
    tensors |= {"score": make.constant(size), **make.caches(heads, 5, "float32"), **where}
    return Case("AdditiveAttention", heads, tensors)


OPERATORS: tuple[Callable[[Maker], Case], ...] = (
    *(linear, embedding, experts, head_linear, attention, cross_attention, encoder_attention),
    *(store, update, recurrence, ends, recall, additive_attention),
)
