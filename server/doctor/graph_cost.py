"""What a step of a graph must read and multiply, counted from the graph itself.

Knows: ONNX's protobuf messages, as far as they name weights; which operators have matrices.
Does not know: ONNX Runtime, time. A serving machine has no `onnx` package.

Only matrices count: norms, tables and the rows of an embedding that a step reads are next to
nothing. Keys and values aren't weights: whoever asks adds them.
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

from quill.export.bundle.graph_contract import LOGIT_INDICES

# Of onnx.proto.
_GRAPH, _NODE, _INITIALIZER = 7, 1, 5
_INPUT, _OUTPUT, _OPERATOR, _ATTRIBUTE = 1, 2, 4, 5
_ATTRIBUTE_NAME, _ATTRIBUTE_INTEGER = 1, 3
_DIMS, _TYPE, _NAME = 1, 2, 8
_ITEM_BYTES = {1: 4, 2: 1, 3: 1, 10: 2, 16: 2}  # float, uint8, int8, float16, bfloat16
_WHOLE = ("MatMul", "Gemm")  # their weights are as they are multiplied
_PACKED = ("Linear", "HeadLinear")

Value = int | memoryview


class Cost(NamedTuple):
    """`*_token`: of each token; `*_logit`: of each token that needs logits."""

    weight_bytes: int  # which a step of one token with logits reads
    products_token: int
    products_logit: int


class _Node(NamedTuple):
    operator: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, int]


def count_cost(path: Path) -> Cost:
    graph = next(_messages(memoryview(path.read_bytes()), _GRAPH))
    weights = dict(map(_weight, _messages(graph, _INITIALIZER)))
    products, num_bytes, after_selection = [0, 0], 0.0, {LOGIT_INDICES}
    for node in map(_node, _messages(graph, _NODE)):
        is_late = not after_selection.isdisjoint(node.inputs)
        if is_late:
            after_selection.update(node.outputs)
        sizes = [weights[name] for name in node.inputs if len(weights.get(name, ())) > 1]
        numbers, share = node.attributes, 1.0
        if node.operator in _PACKED:
            num, sizes = numbers["inputs"] * numbers["columns"] * numbers.get("heads", 1), sizes[:1]
        elif node.operator in _WHOLE:
            sizes = [size for size in sizes if len(size) > 2]
            num = sum(prod(size[1:]) for size in sizes)
        elif node.operator == "Experts":
            num = 3 * numbers["inputs"] * numbers["d_expert"] * numbers["per_token"]
            share = numbers["per_token"] / numbers["number"]
        else:
            continue
        products[is_late] += num
        num_bytes += share * sum(map(prod, sizes))
    return Cost(int(num_bytes), *products)


def _weight(tensor: memoryview) -> tuple[str, tuple[int, ...]]:
    """Its name; the bytes of an element, and its dimensions."""
    name, dims, item = "", list[int](), 0
    for field, value in _fields(tensor):
        if field == _NAME and isinstance(value, memoryview):
            name = _text(value)
        elif field == _DIMS:
            dims += [value] if isinstance(value, int) else _packed(value)
        elif field == _TYPE and isinstance(value, int):
            item = _ITEM_BYTES.get(value, 8)
    return name, (item, *dims)


def _node(node: memoryview) -> _Node:
    found = _Node("", [], [], {})
    for field, value in _fields(node):
        assert isinstance(value, memoryview)
        if field == _INPUT:
            found.inputs.append(_text(value))
        elif field == _OUTPUT:
            found.outputs.append(_text(value))
        elif field == _OPERATOR:
            found = found._replace(operator=_text(value))
        elif field == _ATTRIBUTE:
            parts = dict(_fields(value))
            name, integer = parts[_ATTRIBUTE_NAME], parts.get(_ATTRIBUTE_INTEGER)
            if isinstance(name, memoryview) and isinstance(integer, int):
                found.attributes[_text(name)] = integer
    return found


def _text(value: memoryview) -> str:
    return bytes(value).decode()


def _messages(message: memoryview, wanted: int) -> Iterator[memoryview]:
    for field, value in _fields(message):
        if field == wanted and isinstance(value, memoryview):
            yield value


def _fields(message: memoryview) -> Iterator[tuple[int, Value]]:
    """The numbers and values of a protobuf message's fields."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        match key & 7:
            case 0:
                value, at = _varint(message, at)
                yield key >> 3, value
            case 2:
                size, at = _varint(message, at)
                yield key >> 3, message[at : at + size]
                at += size
            case kind:
                size = 8 if kind == 1 else 4
                yield key >> 3, message[at : at + size]
                at += size


def _packed(values: memoryview) -> list[int]:
    found, at = [], 0
    while at < len(values):
        value, at = _varint(values, at)
        found.append(value)
    return found


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
