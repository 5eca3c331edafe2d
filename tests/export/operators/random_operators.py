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

from quill.export.graph.quill_layers import VERSION
from quill.export.quantize.quill_layout import FLOATS, LAYOUTS, lay_out
from quill.export.verify.runner import Array
from quill.model.checkpoint.quantized_weight import FORMATS
from tests.random_weights import random_rows

IDS = (-1, -16, -(2**31), 2**31 - 1, 2**30, 2**20, 1, 2, 17, 100)
# Where a tensor comes from; the last three are computed in the graph, and can't be folded away.
Source = Literal["input", "constant", "default", "sliced", "copied", "empty"]

# By the numbers of layouts: inputs of a record, and bytes of one with 16 columns.
RECORD_INPUTS = {number: FORMATS[kind].size for kind, number in LAYOUTS.items()} | {FLOATS: 32}
RECORD_BYTES = {
    number: lay_out(random_rows(kind, 16, FORMATS[kind].size)).numel()
    for kind, number in LAYOUTS.items()
} | {FLOATS: 32 * 16 * 4}


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
    version: int = VERSION


class Maker:
    """Makes the parts that graphs of several operators have."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.numbers = np.random.default_rng(chance.getrandbits(32))

    def floats(self, *sizes: int) -> Array:
        return self.numbers.standard_normal(sizes).astype(np.float32)

    def constant(self, *sizes: int) -> Tensor:
        return Tensor(self.floats(*sizes), "constant")

    def layout(self) -> int:
        return self.chance.choice(list(LAYOUTS.values()))

    def input_bits(self) -> int:
        return self.chance.choice((8, 16))

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
            return {"cosines": None, "sines": None}
        half = heads.get("rotary_size", heads["head_size"]) // 2
        return {name: Tensor(self.floats(num_positions, half)) for name in ("cosines", "sines")}

    def positions(self, heads: dict[str, Any], most: int) -> dict[str, Tensor | None]:
        """Rotary tables, a bias by distance, both or neither."""
        rotary = self.rotary(heads, most)
        if self.chance.random() < 0.5:
            return rotary
        absent: dict[str, Tensor | None] = {"cosines": None, "sines": None}
        return absent | rotary | {"bias": Tensor(self.floats(heads["heads"], 2 * most - 1))}


def records_bytes(layout: int, inputs: int, columns: int) -> int:
    return -(-columns // 16) * (inputs // RECORD_INPUTS[layout]) * RECORD_BYTES[layout]


def value_size(heads: dict[str, Any]) -> int:
    return int(heads.get("value_size", heads["head_size"]))


def linear(make: Maker) -> Case:
    chance = make.chance
    layout, gated = make.layout(), chance.randint(0, 1)
    inputs = RECORD_INPUTS[layout] * chance.randint(1, 3)
    columns = 32 * chance.randint(1, 3) if gated else chance.randint(1, 70)
    num_bytes = records_bytes(layout, inputs, columns)
    x, outputs = make.rows(inputs), columns // (1 + gated)
    tensors: dict[str, Tensor | None] = {"x": Tensor(x), "records": make.records(num_bytes)}
    tensors["gains"] = make.maybe(make.constant(inputs))
    tensors["residual"] = make.maybe(Tensor(make.floats(*x.shape[:-1], outputs)))
    tensors["bias"] = make.maybe(make.constant(outputs))
    attributes = {"inputs": inputs, "columns": columns, "layout": layout}
    attributes["input_bits"] = make.input_bits()
    return Case("Linear", attributes | {"gated": gated, "epsilon": 1e-5}, tensors)


def embedding(make: Maker) -> Case:
    layout, columns = make.layout(), make.chance.randint(1, 70)
    inputs = RECORD_INPUTS[layout] * make.chance.randint(1, 3)
    records = make.records(records_bytes(layout, inputs, columns))
    ids = Tensor(make.numbers.integers(0, columns, make.rows(1).shape[:-1]))
    attributes = {"inputs": inputs, "columns": columns, "layout": layout}
    return Case("Embedding", attributes, {"x": ids, "records": records})


def experts(make: Maker) -> Case:
    chance = make.chance
    groups, of_group = chance.choice((1, 1, 2, 3)), chance.randint(1, 6)
    top, number = chance.randint(1, groups), groups * of_group
    layouts = [chance.choice((make.layout(), FLOATS)) for _ in range(2)]
    width, inner = (RECORD_INPUTS[layout] * chance.randint(1, 2) for layout in layouts)
    attributes: dict[str, Any] = {"inputs": width, "d_expert": inner, "number": number}
    attributes |= {"groups": groups, "top_groups": top, "group_best": chance.randint(1, of_group)}
    attributes |= {"per_token": chance.randint(1, of_group * top), "scale": 1.0}
    attributes |= {"normalize": chance.randint(0, 1), "sigmoid": chance.randint(0, 1)}
    for name, layout in zip(("up", "down"), layouts, strict=True):
        attributes |= {f"{name}_layout": layout, f"{name}_input_bits": make.input_bits()}
    x = make.rows(width)
    tensors: dict[str, Tensor | None] = {"x": Tensor(x)}
    tensors["logits"] = Tensor(make.floats(*x.shape[:-1], number))
    tensors["up"] = make.records(number * records_bytes(layouts[0], width, 2 * inner))
    tensors["down"] = make.records(number * records_bytes(layouts[1], inner, width))
    tensors["balance"] = make.maybe(make.constant(number))
    tensors["up_bias"] = make.maybe(make.constant(number * 2 * inner))
    tensors["down_bias"] = make.maybe(make.constant(number * width))
    if chance.random() < 0.5:
        attributes |= {"clamp": chance.choice((0.0, 0.5, 7.0)), "slope": 1.702}
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
    tensors |= make.caches(heads, 5, dtype) | where | {"cosines": None, "sines": None}
    tensors["sinks"] = make.maybe(Tensor(make.floats(heads["heads"])))
    tensors |= make.positions(heads, 350)
    outputs = {"y": "float32", "new_keys": dtype, "new_values": dtype}
    return Case("Attention", heads, tensors, outputs)


def short_conv(make: Maker) -> Case:
    heads, dtype = make.heads(), make.chance.choice(("float16", "float32"))
    heads = {name: heads[name] for name in ("kv_heads", "head_size", "scale")}
    heads |= {"heads": heads["kv_heads"], "taps": make.chance.choice((1, 3, 3, 4, 40))}
    counts, where = make.sequences(5, causal=True)
    channels = 2 * heads["heads"] * heads["head_size"]
    tensors: dict[str, Tensor | None] = {"x": Tensor(make.floats(sum(counts), channels))}
    tensors["kernel"] = make.constant(heads["taps"], channels)
    tensors |= make.caches(heads, 5, dtype) | where
    tensors["bias"] = make.maybe(make.constant(channels))
    outputs = {"y": "float32", "new_keys": dtype, "new_values": dtype}
    return Case("ShortConv", heads, tensors, outputs)


def cross_attention(make: Maker) -> Case:
    heads, dtype = make.heads(), make.chance.choice(("float16", "float32"))
    counts, where = make.sequences(5, causal=False)
    q = make.floats(sum(counts), heads["heads"] * heads["head_size"])
    return Case("CrossAttention", heads, {"q": Tensor(q), **make.caches(heads, 5, dtype), **where})


def encoder_attention(make: Maker) -> Case:
    case = attention(make)
    names = ("qkv", "query_starts", "cosines", "sines", "bias")
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
    short_conv,
    *(store, update, recurrence, ends, recall, additive_attention),
)
