"""Random graphs of one custom operator, most of them wrong: each is rejected or computed.

Knows: graphs, what can be wrong with one. Does not know: operators, kernels.
`make test-sanitize` runs it with a library that notices every access out of bounds. A graph is made
from a seed and its number alone; both are in a file before the graph is opened.
"""

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from quill.export.operators.library import library_path
from quill.export.verify.runner import Array
from tests.export.operators.random_operators import IDS, OPERATORS, Case, Maker, Source, Tensor

MAX_ELEMENTS = 2**16  # of a tensor that is made
MAX_BYTES = 2**28  # of what is computed from such tensors
SIZES = (0, 1, 2, 3, 15, 16, 17, 32, 33, 48, 64, 128, 129, 640, 656, 4096, 4097, 65536, 2**24)
HUGE = (2**24 + 32, 2**31 - 1, 2**31, 2**32, 2**38, 2**53, 2**60, 2**62, 2**63 - 1)
NUMBERS = (*SIZES, *HUGE, *(-size for size in (*SIZES, *HUGE)), -(2**63))
FLOATS = (0.0, -1.0, 1e30, -1e30, 1e-40, float("nan"), float("inf"), -float("inf"))
TYPES = ("float32", "float16", "float64", "uint8", "int8", "int32", "int64", "bool")
OPTIONAL = ("window", "value_size", "rotary_size", "soft_cap", "clamp", "slope")
Outcomes = Counter[tuple[str, str]]  # by operator, and what came of it


class Changer:
    """Changes something that may or may not fit then."""

    def __init__(self, make: Maker, case: Case) -> None:
        self._make, self._chance, self._case = make, make.chance, case

    def change(self) -> None:
        often = (self._attribute, self._shape, self._values, self._source)
        self._chance.choice((*often, *often, *often, self._type, self._names))()

    def _attribute(self) -> None:
        attributes, chance = self._case.attributes, self._chance
        name = chance.choice((*attributes, *OPTIONAL))
        before = attributes.pop(name, 16)
        if chance.random() < 0.05:
            return
        if chance.random() < 0.05:
            attributes[name] = chance.choice(("16", [16], [16.0], "", 0.5, 16))
        elif isinstance(before, float):
            attributes[name] = chance.choice(FLOATS)
        elif isinstance(before, int) and abs(before) < 2**31 and chance.random() < 0.5:
            attributes[name] = before + chance.choice((-32, -16, -1, 1, 16, 32, before))
        else:
            attributes[name] = chance.choice(NUMBERS)

    def _tensor(self) -> Tensor | None:
        return self._chance.choice([*self._case.inputs.values(), None])

    def _shape(self) -> None:
        tensor, chance = self._tensor(), self._chance
        if tensor is None:
            return
        sizes = list(tensor.array.shape)
        action = chance.randrange(4) if sizes else 0
        if action == 0:
            sizes.insert(chance.randint(0, len(sizes)), chance.choice((0, 1, 1, 2)))
        elif action == 1:
            del sizes[chance.randrange(len(sizes))]
        else:
            at = chance.randrange(len(sizes))
            sizes[at] = max(0, sizes[at] + chance.choice((-16, -1, 1, 16, sizes[at], -sizes[at])))
        if chance.random() < 0.05:
            sizes += [1] * 8
        if np.prod(sizes, dtype=object) <= MAX_ELEMENTS:
            # Values go on where there are more of them.
            tensor.array = np.resize(tensor.array, sizes)

    def _values(self) -> None:
        tensor, chance = self._tensor(), self._chance
        if tensor is None or not tensor.array.size:
            return
        flat = tensor.array.reshape(-1).copy()
        for _ in range(chance.choice((1, 1, 2, 5))):
            at = chance.randrange(flat.size)
            if flat.dtype.kind == "f":
                with np.errstate(over="ignore"):
                    flat[at] = np.float64(chance.choice(FLOATS)).astype(flat.dtype)
            elif flat.dtype.kind == "i":
                new = chance.choice((*IDS, int(flat[at]) + 1, int(flat[at]) - 1))
                limits = np.iinfo(flat.dtype)
                flat[at] = min(max(new, limits.min), limits.max)
        tensor.array = flat.reshape(tensor.array.shape)

    def _source(self) -> None:
        tensor, chance = self._tensor(), self._chance
        if tensor is None:
            return
        tensor.source = chance.choice(get_args(Source))
        tensor.length = chance.choice((0, 0, 1, 2**40))
        sizes = list(tensor.array.shape) or [1]
        if chance.random() < 0.7:
            sizes[chance.randrange(len(sizes))] = chance.choice((*SIZES, *HUGE))
        sizes[chance.randrange(len(sizes))] = 0
        tensor.sizes = tuple(sizes)

    def _type(self) -> None:
        tensor = self._tensor()
        if tensor is not None:
            with np.errstate(all="ignore"):
                tensor.array = tensor.array.astype(self._chance.choice(TYPES))

    def _names(self) -> None:
        inputs, outputs, chance = self._case.inputs, self._case.outputs, self._chance
        action = chance.randrange(5)
        if action == 0:
            inputs[chance.choice(list(inputs))] = None
        elif action == 1:
            inputs.popitem()
        elif action == 2 and outputs:
            del outputs[chance.choice(list(outputs))]
        elif action == 3:
            outputs["more"] = "float32"
        else:
            self._case.version = chance.choice((0, 1, 2, 4, 2**40))


def make_case(seed: int, number: int) -> Case:
    chance = random.Random(f"{seed} {number}")
    make = Maker(chance)
    case = OPERATORS[number % len(OPERATORS)](make)
    changer = Changer(make, case)
    for _ in range(chance.choice((0, 1, 1, 2, 4))):
        changer.change()
    return case


class GraphWriter:
    """The nodes that make an operator's inputs, and what to feed."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.feeds: dict[str, Array] = {}
        self.defaults: list[onnx.TensorProto] = []
        self.constants: list[onnx.TensorProto] = []

    def take(self, name: str, tensor: Tensor) -> str:
        """The name of the operator's input."""
        if tensor.source in ("constant", "default"):
            made = onnx.numpy_helper.from_array(tensor.array, name)
            (self.constants if tensor.source == "constant" else self.defaults).append(made)
            return name
        if tensor.source == "input":
            self.feeds[name] = tensor.array
            return name
        if tensor.source == "sliced" and tensor.array.ndim:
            whole = self._fed(name, tensor.array)
            ends = self._fed(f"{name}_ends", np.array([tensor.length]))
            starts = self._fed(f"{name}_starts", np.array([0]))
            return self._node("Slice", [whole, starts, ends], name)
        if tensor.source == "empty":
            sizes = self._fed(name, np.array(tensor.sizes, np.int64))
            zero = onnx.numpy_helper.from_array(np.zeros(1, tensor.array.dtype))
            return self._node("ConstantOfShape", [sizes], name, value=zero)
        return self._node("Identity", [self._fed(name, tensor.array)], name)

    def _fed(self, name: str, array: Array) -> str:
        self.feeds[f"{name}_from"] = array
        return f"{name}_from"

    def _node(self, operator: str, inputs: list[str], name: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name

    def given(self) -> Iterator[onnx.ValueInfoProto]:
        for name, array in self.feeds.items():
            yield _info(name, array.dtype)
        for default in self.defaults:
            yield helper.make_tensor_value_info(default.name, default.data_type, None)


def _info(name: str, dtype: "np.dtype[Any]") -> onnx.ValueInfoProto:
    kind = helper.np_dtype_to_tensor_dtype(dtype)
    return helper.make_tensor_value_info(name, kind, None)


def write(case: Case) -> tuple[bytes, dict[str, Array]]:
    """The model, and what to feed it."""
    graph = GraphWriter()
    names = [graph.take(name, each) if each else "" for name, each in case.inputs.items()]
    node = helper.make_node(case.operator, names, list(case.outputs), domain="quill")
    node.attribute.extend(helper.make_attribute(*each) for each in case.attributes.items())
    made = helper.make_graph(
        [*graph.nodes, node],
        "one",
        list(graph.given()),
        [_info(name, np.dtype(kind)) for name, kind in case.outputs.items()],
        [*graph.constants, *graph.defaults],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("quill", case.version)]
    model = helper.make_model(made, opset_imports=opsets, ir_version=10)
    return model.SerializeToString(), graph.feeds


def open_session(model: bytes | Path, library: Path, chance: random.Random) -> Any:
    """Each tensor has memory of its own: reading beyond one isn't reading another."""
    options = onnxruntime.SessionOptions()
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    options.intra_op_num_threads = chance.choice((1, 2))
    options.log_severity_level = 4
    if chance.random() < 0.5:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.register_custom_ops_library(os.fspath(library))
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def try_graph(seed: int, number: int, library: Path) -> tuple[str, str]:
    """The operator, and what came of its graph."""
    case = make_case(seed, number)
    model, feeds = write(case)
    try:
        session = open_session(model, library, random.Random(number))
    except Exception:  # the runtime has many classes for these
        return case.operator, "not opened"
    try:
        outputs = session.run(None, feeds)
    except Exception:
        return case.operator, "not run"
    sizes = [output.nbytes for output in outputs]
    assert sum(sizes) <= MAX_BYTES, f"{case.operator}: {sizes}"
    return case.operator, "computed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", type=Path, default=library_path())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--graphs", type=int, default=sys.maxsize)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--progress", type=Path, default=Path(os.devnull))
    args = parser.parse_args()
    outcomes, end_s = Outcomes(), time.monotonic() + args.seconds
    with args.progress.open("w") as progress:
        for number in range(args.first, args.first + args.graphs):
            if time.monotonic() > end_s:
                break
            progress.seek(0)
            progress.write(f"{args.seed} {number}")
            progress.flush()
            outcomes[try_graph(args.seed, number, args.library)] += 1
    print(f"{outcomes.total():,} random graphs (seed {args.seed})")
    for (operator, outcome), num in sorted(outcomes.items()):
        print(f"  {operator}, {outcome}: {num:,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
