"""Graphs that no exporter writes are errors: operators trust nothing that a graph gives them.

`make test-sanitize` tries many more of them, with a library that notices access out of bounds.
"""

import os
import random
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from quill.export.operators.library import library_path
from quill.export.verify.runner import Array
from tests.export.operators import random_operators as operators
from tests.export.operators.random_graphs import open_session, write
from tests.export.operators.random_operators import Case, Maker, Tensor
from tests.operators import needs_operators

pytestmark = needs_operators

ROOT = Path(__file__).parents[3]
SIZE = 48
HEADS: dict[str, Any] = {"heads": 1, "kv_heads": 1, "head_size": SIZE, "scale": 1.0}
WEIGHTS = [
    *((operators.linear, name) for name in ("records", "gains", "bias")),
    *((operators.experts, name) for name in ("up", "down", "balance", "up_bias", "down_bias")),
    *((operators.short_conv, name) for name in ("kernel", "bias")),
    *((operators.recurrence, name) for name in ("weights", "bias")),
    *((operators.embedding, "records"), (operators.head_linear, "records")),
    (operators.additive_attention, "score"),
]


def run(case: Case) -> list[Array]:
    model, feeds = write(case)
    session = open_session(model, library_path(), random.Random(0))
    outputs: list[Array] = session.run(None, feeds)
    return outputs


def ints(*values: Any) -> Tensor:
    return Tensor(np.array(values, np.int32))


@pytest.mark.parametrize(
    ("make", "name"), WEIGHTS, ids=lambda each: getattr(each, "__name__", each)
)
def test_empty_tensor_that_a_graph_computes_is_no_weight(
    make: Callable[[Maker], Case], name: str
) -> None:
    """It has no data, as a weight that is missing: kernels would read at address 0."""
    for seed in range(5):
        case = make(Maker(random.Random(seed)))
        if case.operator == "AdditiveAttention":
            case.attributes = HEADS | {"head_size": case.attributes["head_size"]}
        weight = case.inputs[name] or Tensor(np.ones(1, np.float32))
        case.inputs[name] = Tensor(weight.array, "sliced", length=0)
        with pytest.raises(Exception, match="weights that aren't constants"):
            run(case)


@pytest.mark.parametrize("block", [2**27, -1, -(2**31), 2**31 - 1])
def test_source_without_positions_has_no_final_annotations(block: int) -> None:
    """No position means that no block was checked: the first one in the table can be any number."""
    cache = Tensor(np.ones((2, 1, 16, SIZE), np.float32))
    where = {"starts": ints(0, 0, 2), "lengths": ints(0, 1), "table": ints([block], [0])}
    with pytest.raises(Exception, match="a source without positions"):
        run(Case("Ends", HEADS, {"value_cache": cache, **where}))


@pytest.mark.parametrize("change", [{"value_size": 16}, {"heads": 2}, {"heads": 2, "kv_heads": 2}])
@pytest.mark.parametrize(
    "make",
    [operators.ends, operators.recall, operators.additive_attention],
    ids=lambda each: each.__name__,
)
def test_states_of_other_heads_than_one_are_refused(
    make: Callable[[Maker], Case], change: dict[str, int]
) -> None:
    """Caches that fit the attributes: kernels copied head_size numbers of a narrower value."""
    case = make(Maker(random.Random(0)))
    case.attributes = HEADS | change
    caches = Maker(random.Random(0)).caches(case.attributes, 5, "float32")
    case.inputs |= {name: cache for name, cache in caches.items() if name in case.inputs}
    with pytest.raises(Exception, match="states that aren't those of one head"):
        run(case)


def test_cache_of_as_many_numbers_in_another_shape_has_no_final_annotations() -> None:
    where = {"starts": ints(0, 1), "lengths": ints(1), "table": ints([0])}
    cache = Tensor(np.ones((2, 16, 1, SIZE), np.float32))
    with pytest.raises(Exception, match="a cache of another size"):
        run(Case("Ends", HEADS, {"value_cache": cache, **where}))


@pytest.mark.parametrize("sizes", [(0, 2**62, 32), (0, 2**40, 2**40, 32), (2**62, 0, 32)])
def test_empty_tensor_whose_sizes_overflow_is_refused(sizes: tuple[int, ...]) -> None:
    case = operators.linear(Maker(random.Random(0)))
    case.attributes |= {"inputs": 32, "columns": 16, "gated": 0, "layout": 4, "input_bits": 16}
    case.inputs = {"x": Tensor(np.zeros(0, np.float32), "empty", sizes=sizes)}
    case.inputs |= {"records": Tensor(np.zeros(544, np.uint8), "constant")}
    with pytest.raises(Exception, match="more elements than there can be"):
        run(case)


def test_scores_of_other_experts_are_refused() -> None:
    """As many numbers as the right ones have."""
    case = operators.experts(Maker(random.Random(0)))
    number, width = 5, case.attributes["inputs"]
    case.attributes |= {"number": number, "groups": 1, "top_groups": 1}
    case.attributes |= {"group_best": 1, "per_token": 1}
    for name in ("up", "down"):
        tensor = case.inputs[name]
        assert tensor is not None
        one = len(tensor.array) // operators.experts(Maker(random.Random(0))).attributes["number"]
        tensor.array = np.resize(tensor.array, number * one)
    case.inputs |= {"x": Tensor(np.ones((3, width), np.float32)), "balance": None}
    case.inputs |= {"up_bias": None, "down_bias": None}
    case.inputs["logits"] = Tensor(np.ones((3, number), np.float32))
    assert run(case)[0].shape == (3, width)
    case.inputs["logits"] = Tensor(np.ones((number, 3), np.float32))
    with pytest.raises(Exception, match="scores for other tokens or experts"):
        run(case)


@pytest.mark.parametrize("offset", [1, 2, 4097])
def test_weights_that_are_not_aligned_in_their_file_are_refused(
    offset: int, tmp_path: Path
) -> None:
    """The runtime maps the file, so the graph says where in memory they are."""
    graph = onnx.load_model_from_string(write(operators.head_linear(Maker(random.Random(0))))[0])
    (weights,) = graph.graph.initializer
    data = weights.raw_data
    (tmp_path / "weights").write_bytes(bytes(offset) + data)
    onnx.external_data_helper.set_external_data(weights, "weights", offset, len(data))
    weights.ClearField("raw_data")
    (tmp_path / "graph").write_bytes(graph.SerializeToString())
    with pytest.raises(Exception, match="data that isn't aligned"):
        open_session(tmp_path / "graph", library_path(), random.Random(0))


def test_random_graphs_are_rejected_or_computed() -> None:
    """In a process of their own: a crash has a seed and a number. None of them is rejected for
    another reason than its changes: each operator computes some."""
    module = "tests.export.operators.random_graphs"
    command = [sys.executable, "-m", module, "--seed", "1", "--graphs", "520"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    outcomes = defaultdict[str, dict[str, int]](dict)
    for line in done.stdout.splitlines()[1:]:
        operator, outcome, num = re.split(", |: ", line.strip())
        outcomes[operator][outcome] = int(num)
    assert len(outcomes) == len(operators.OPERATORS)
    assert all(each["computed"] and each["not opened"] for each in outcomes.values())
