"""The graphs: one clean node for each idea, the documented names, nothing of this machine."""

from collections import Counter

import numpy as np
import onnx
import pytest

from quill.export.bundle import graph_contract
from quill.export.verify.runner import Runner, open_session
from tests.export.tiny import Exported


def load(exported: Exported, role: str = "decoder", precision: str = "fp32") -> onnx.ModelProto:
    graphs = exported.manifest.graphs_in(precision)
    name = graphs.decoder if role == "decoder" else graphs.encoder
    assert name is not None
    return onnx.load(exported.directory / name, load_external_data=False)


def operators(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def test_a_llama_is_as_few_nodes_as_it_has_ideas(llama: Exported) -> None:
    found = operators(load(llama))
    assert found == {
        "Gather": 2,  # the embedding, and the positions whose logits are wanted
        "RMSNormalization": 5,
        "MatMul": 8,
        "GroupQueryAttention": 2,
        "Split": 2,  # SwiGLU's gate and value
        "Sigmoid": 2,
        "Mul": 4,
        "Add": 4,
        "Reshape": 2,
        "Gemm": 1,
    }


def test_an_int4_graph_has_only_integer_matrices(llama: Exported) -> None:
    found = operators(load(llama, precision="int4"))
    assert found["MatMulNBits"] == 9
    assert found["GatherBlockQuantized"] == 1
    assert found["Gemm"] == 0


def test_inputs_and_outputs_have_the_documented_names_and_shapes(llama: Exported) -> None:
    graph = load(llama).graph
    names = [value.name for value in (*graph.input, *graph.output)]
    assert names == [
        *("input_ids", "seqlens_k", "total_sequence_length", "logit_indices"),
        *("past_key_0", "past_value_0", "past_key_1", "past_value_1"),
        "logits",
        *("present_key_0", "present_value_0", "present_key_1", "present_value_1"),
    ]
    shapes = {
        value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    assert shapes["input_ids"] == ["rows", "tokens"]
    assert shapes["past_key_0"] == shapes["present_key_0"] == ["rows", 2, "capacity", 16]
    assert shapes["logits"] == ["num_logits", 272]
    assert shapes["total_sequence_length"] == []


def test_a_seq2seq_model_has_two_graphs_with_the_documented_names(seq2seq: Exported) -> None:
    decoder, encoder = load(seq2seq).graph, load(seq2seq, "encoder").graph
    assert [value.name for value in encoder.input] == ["source_ids", "source_positions"]
    parked = graph_contract.cache_names("present", 2, cross=True)
    assert [value.name for value in encoder.output] == parked
    inputs = [value.name for value in decoder.input]
    assert inputs[8:10] == ["source_seqlens_k", "source_total_length"]
    assert inputs[10:] == graph_contract.cache_names("past", 2, cross=True)


def test_logits_are_gathered_before_the_vocabulary_projection(exported: Exported) -> None:
    graph = load(exported).graph
    producers = {name: node for node in graph.node for name in node.output}
    projection = producers[graph_contract.LOGITS]
    assert projection.op_type == "Gemm"
    assert producers[projection.input[0]].op_type == "Gather"


def test_nothing_in_a_graph_names_a_file_of_this_machine(exported: Exported) -> None:
    for path in exported.directory.glob("*.onnx"):
        assert b"/work" not in path.read_bytes()
        assert b".py" not in path.read_bytes()


def test_weights_lie_beside_the_graph_under_a_relative_name(exported: Exported) -> None:
    model, weights = load(exported), exported.manifest.graphs_in("fp32").weights
    locations = {
        entry.value
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    assert locations == {weights}
    for path in exported.directory.glob("*.onnx"):
        assert path.stat().st_size < 200_000


def test_a_weight_is_stored_once_though_two_graphs_use_it(exported: Exported) -> None:
    graphs = exported.manifest.graphs_in("fp32")
    size = (exported.directory / graphs.weights).stat().st_size
    tables = 4 * exported.checkpoint.config.context * exported.checkpoint.config.d_model
    assert size <= 4 * exported.manifest.sizes.num_parameters + tables


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_no_logits_may_be_asked_for(llama: Exported, precision: str) -> None:
    """A prefill chunk that isn't the last has no use for any."""
    graphs = llama.manifest.graphs_in(precision)
    runner = Runner(llama.directory, graphs, llama.manifest.sizes, 1, 16)
    assert runner.prefill(0, [1, 2, 3], []).shape == (0, 272)
    assert runner.prefill(0, [4, 5, 6]).shape == (1, 272)


def test_caches_are_extended_in_place(llama: Exported) -> None:
    graphs = llama.manifest.graphs_in("fp32")
    runner = Runner(llama.directory, graphs, llama.manifest.sizes, 2, 16)
    runner.prefill(0, [1, 2, 3])
    before = [cache.copy() for cache in runner.keys_and_values(0)]
    runner.decode([4])
    after = runner.keys_and_values(0)
    assert after[0].shape == (2, 4, 16)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new[:, :3])
        assert np.abs(new[:, 3]).max() > 0


def test_half_precision_answers_in_float32(gpt: Exported) -> None:
    graphs = gpt.manifest.graphs_in("fp16")
    session = open_session(gpt.directory / graphs.decoder)
    types = {value.name: value.type for value in (*session.get_inputs(), *session.get_outputs())}
    assert types["past_key_0"] == "tensor(float16)"
    assert types["logits"] == "tensor(float)"
