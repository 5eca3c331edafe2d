"""Whether a row's logits depend on its company, measured on real graphs and on a crooked one."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from quill.export.bundle.graph_contract import INPUT_IDS, LOGITS
from quill.export.bundle.manifest import Graphs
from quill.export.verify import batch_invariance
from quill.export.verify.batch_invariance import NUM_SLOTS, measure_invariance
from quill.export.verify.held_out import Passage
from quill.export.verify.runner import Runner
from tests.export.tiny import Exported, changed
from tests.operators import SERVED

pytestmark = pytest.mark.portable


def passages(exported: Exported) -> list[Passage]:
    chance = np.random.default_rng(0)
    config = exported.checkpoint.config
    rows = chance.integers(0, config.vocab_size, (4, 60)).tolist()
    source = () if config.family == "causal" else tuple(range(9))
    return [Passage(tuple(row), source) for row in rows]


def runner_for(exported: Exported, directory: Path, graphs: Graphs) -> Runner:
    return Runner(directory, graphs, exported.manifest.sizes, NUM_SLOTS, 64)


@pytest.mark.parametrize("precision", SERVED)
def test_a_row_is_the_same_bits_in_any_company(exported: Exported, precision: str) -> None:
    found = exported.manifest.graphs_in(precision).invariance
    assert found is not None
    assert found.holds
    assert found.rows == (1, 2, 3, 8, 32)
    assert found.num_cut_tokens >= exported.manifest.sizes.context


def test_half_precision_is_not_measured_on_a_cpu(llama: Exported) -> None:
    assert llama.manifest.graphs_in("fp16").invariance is None


def lean_on_the_neighbours(model: onnx.ModelProto) -> None:
    """Adds a millionth of the rows' mean to each row's logits."""
    last = next(node for node in model.graph.node if LOGITS in node.output)
    last.output[0] = "own"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "axis"))
    small = np.array(1e-6, np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(small, "small"))
    model.graph.node.extend(
        [
            helper.make_node("ReduceMean", ["own", "axis"], ["mean"]),
            helper.make_node("Mul", ["mean", "small"], ["part"]),
            helper.make_node("Add", ["own", "part"], [LOGITS]),
        ]
    )


@pytest.mark.parametrize("family", ["llama", "seq2seq"])
def test_a_graph_whose_rows_lean_on_each_other_is_found_out(
    family: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    exported: Exported = request.getfixturevalue(family)
    graphs = changed(exported, tmp_path, lean_on_the_neighbours)
    runner = runner_for(exported, tmp_path, graphs)
    found = measure_invariance(runner, passages(exported))
    assert not found.holds


def lean_on_the_length_of_the_step(model: onnx.ModelProto) -> None:
    """Adds a tiny part of the number of tokens in the step to what is embedded: a lone token, a
    chunk and a mixed step are no longer one."""
    graph = model.graph
    embedding = next(node for node in graph.node if node.op_type == "Gather")
    first, embedding.output[0] = embedding.output[0], "embedded"
    small = np.array(1e-4, np.float32)
    graph.initializer.append(onnx.numpy_helper.from_array(small, "small"))
    after = [
        helper.make_node("Size", [INPUT_IDS], ["tokens"]),
        helper.make_node("Cast", ["tokens"], ["number"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", ["number", "small"], ["part"]),
        helper.make_node("Add", ["embedded", "part"], [first]),
    ]
    at = list(graph.node).index(embedding) + 1
    nodes = [*graph.node[:at], *after, *graph.node[at:]]
    del graph.node[:]
    graph.node.extend(nodes)


def decode_alike(runner: Runner, prompts: list[Passage]) -> bool:
    return True


@pytest.mark.parametrize("family", ["llama", "seq2seq"])
def test_a_cut_that_changes_something_is_found_out(
    family: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the cuts alone: the crowds aren't asked."""
    exported: Exported = request.getfixturevalue(family)
    monkeypatch.setattr(batch_invariance, "_batches_agree", decode_alike)
    graphs = changed(exported, tmp_path, lean_on_the_length_of_the_step)
    runner = runner_for(exported, tmp_path, graphs)
    assert not measure_invariance(runner, passages(exported)).holds


def test_one_short_passage_is_enough_to_measure_with(llama: Exported) -> None:
    graphs = llama.manifest.graphs_in("fp32")
    runner = runner_for(llama, llama.directory, graphs)
    assert measure_invariance(runner, [Passage(tuple(range(16)))]).holds
