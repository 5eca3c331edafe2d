"""Whether a row's logits depend on its company, measured on real graphs and on a crooked one."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from quill.export.bundle.graph_contract import LOGITS
from quill.export.bundle.manifest import Graphs
from quill.export.verify.batch_invariance import NUM_SLOTS, measure_invariance
from quill.export.verify.held_out import Passage
from quill.export.verify.runner import Runner
from tests.export.tiny import Exported

pytestmark = pytest.mark.portable


def passages(exported: Exported) -> list[Passage]:
    chance = np.random.default_rng(0)
    config = exported.checkpoint.config
    rows = chance.integers(0, config.vocab_size, (4, 60)).tolist()
    source = () if config.family == "causal" else tuple(range(9))
    return [Passage(tuple(row), source) for row in rows]


def runner_for(exported: Exported, directory: Path, graphs: Graphs) -> Runner:
    return Runner(directory, graphs, exported.manifest.sizes, NUM_SLOTS, 64)


def test_fp32_is_bit_identical_for_any_number_of_rows(exported: Exported) -> None:
    found = exported.manifest.graphs_in("fp32").invariance
    assert found is not None
    assert found.holds
    assert found.min_rows == 1
    assert found.rows == (1, 2, 3, 8, 32)


def test_int4_is_bit_identical_from_two_rows_on(exported: Exported) -> None:
    found = exported.manifest.graphs_in("int4").invariance
    assert found is not None
    assert found.holds
    assert found.min_rows <= 2
    assert found.min_chunk == 2


def test_the_manifest_records_the_tile_that_chunks_must_fit(exported: Exported) -> None:
    found = exported.manifest.graphs_in("fp32").invariance
    assert found is not None
    assert found.tile == 16


def test_half_precision_is_not_measured_on_a_cpu(exported: Exported) -> None:
    assert exported.manifest.graphs_in("fp16").invariance is None


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
    graphs = exported.manifest.graphs_in("fp32")
    shutil.copytree(exported.directory, tmp_path, dirs_exist_ok=True)
    model = onnx.load(tmp_path / graphs.decoder)
    lean_on_the_neighbours(model)
    onnx.save(model, tmp_path / graphs.decoder)
    found = measure_invariance(runner_for(exported, tmp_path, graphs), passages(exported))
    assert not found.holds
    assert found.min_rows == 32


def test_one_short_passage_is_enough_to_measure_with(llama: Exported) -> None:
    graphs = llama.manifest.graphs_in("fp32")
    runner = runner_for(llama, llama.directory, graphs)
    assert measure_invariance(runner, [Passage(tuple(range(16)))]).holds
