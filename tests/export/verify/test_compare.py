"""Verification: graphs that compute something else are caught, whatever is wrong with them."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from quill.export.bundle.manifest import Graphs
from quill.export.errors import VerificationError
from quill.export.precisions import PRECISIONS
from quill.export.quantize.quantization import Quantization
from quill.export.verify.compare import (
    Comparison,
    check_comparisons,
    compare,
    far_probes,
    probes,
)
from quill.export.verify.held_out import HeldOut, Passage
from quill.export.verify.pytorch_reference import PyTorchReference, ReferenceOutput
from quill.export.verify.runner import Runner
from tests.export.tiny import Exported, changed

pytestmark = pytest.mark.portable


class Answers(NamedTuple):
    reference: PyTorchReference
    outputs: list[ReferenceOutput]


def answers_for(exported: Exported, quantization: Quantization | None = None) -> Answers:
    config = exported.checkpoint.config
    chance = np.random.default_rng(0)
    source = tuple(chance.integers(0, config.vocab_size, 20).tolist())
    passages = [
        Passage(tuple(chance.integers(0, config.vocab_size, 96).tolist()), source[: 20 - 5 * i])
        for i in range(3)
    ]
    if config.family == "causal":
        passages = [Passage(passage.ids) for passage in passages]
    reference, text = PyTorchReference(exported.checkpoint, quantization), HeldOut("x", passages)
    cuts = [*probes(reference, text, config.context), *far_probes(config, text)]
    return Answers(reference, reference.outputs(cuts, num_cached=len(cuts)))


@pytest.fixture(scope="module")
def llama_answers(llama: Exported) -> Answers:
    return answers_for(llama)


@pytest.fixture(scope="module")
def seq2seq_answers(seq2seq: Exported) -> Answers:
    return answers_for(seq2seq)


def runner_for(exported: Exported, directory: Path, graphs: Graphs) -> Runner:
    return Runner(directory, graphs, exported.manifest.sizes, 3, exported.manifest.sizes.context)


def test_every_situation_of_a_server_is_compared(llama: Exported, llama_answers: Answers) -> None:
    runner = runner_for(llama, llama.directory, llama.manifest.graphs_in("fp32"))
    situations = [comparison.situation for comparison in compare(runner, *llama_answers)]
    assert situations[:2] == ["in prefill", "hidden states in prefill"]
    assert situations[2:4] == ["in prefill by chunks", "in 64 decode steps"]
    assert situations[4] == "cache, keys of layer 0"
    assert "in ragged batches" in situations
    assert "in mixed steps" in situations
    assert "at positions 64 to 95" in situations  # the last of the context
    assert situations[-1] == "cache of positions 64 to 95, values of layer 1"


def test_seq2seq_compares_the_parked_source_too(
    seq2seq: Exported, seq2seq_answers: Answers
) -> None:
    runner = runner_for(seq2seq, seq2seq.directory, seq2seq.manifest.graphs_in("fp32"))
    situations = [comparison.situation for comparison in compare(runner, *seq2seq_answers)]
    assert situations[0] == "cache of the source, keys of layer 0"
    assert "in mixed steps" in situations


def test_probes_have_different_lengths(llama_answers: Answers) -> None:
    lengths = [len(answer.passage.ids) for answer in llama_answers.outputs[:3]]
    assert lengths[0] == 96  # the whole context
    assert len(set(lengths)) == 3


Damage = Callable[[onnx.ModelProto], None]


def initializer(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def change_tensor(
    model: onnx.ModelProto, name: str, change: Callable[[np.ndarray], np.ndarray]
) -> None:
    tensor = initializer(model, name)
    tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor).copy()), name))


def nodes(model: onnx.ModelProto, operator: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == operator]


def shift_rotary_table(model: onnx.ModelProto) -> None:
    """Every position is taken for the next one: no logit changes, but every key does."""
    for name in nodes(model, "Attention")[0].input[6:8]:
        change_tensor(model, name, lambda table: np.roll(table, -1, axis=0))


def stretch_rotary_table(model: onnx.ModelProto) -> None:
    for name in nodes(model, "Attention")[0].input[6:8]:
        change_tensor(model, name, lambda table: np.repeat(table, 2, axis=0)[: len(table)])


def spoil_one_matrix(model: onnx.ModelProto) -> None:
    change_tensor(model, nodes(model, "Gemm")[3].input[1], lambda matrix: matrix[:, ::-1])


def spoil_one_row_of_the_embedding(model: onnx.ModelProto) -> None:
    def zero(matrix: np.ndarray) -> np.ndarray:
        matrix[7] = 0
        return matrix

    change_tensor(model, nodes(model, "Gemm")[0].input[1], zero)


def exchange_gate_and_value(model: onnx.ModelProto) -> None:
    split = nodes(model, "Split")[0]
    split.output[0], split.output[1] = split.output[1], split.output[0]


def sharpen_attention(model: onnx.ModelProto) -> None:
    for attribute in nodes(model, "Attention")[1].attribute:
        if attribute.name == "scale":
            attribute.f *= 1.1


def drop_a_residual(model: onnx.ModelProto) -> None:
    add = nodes(model, "Add")[1]
    add.input[0] = add.input[1]


def give_nan(model: onnx.ModelProto) -> None:
    change_tensor(model, nodes(model, "RMSNormalization")[0].input[1], lambda x: x * math.nan)


DAMAGES: list[Damage] = [
    shift_rotary_table,
    stretch_rotary_table,
    spoil_one_matrix,
    spoil_one_row_of_the_embedding,
    exchange_gate_and_value,
    sharpen_attention,
    drop_a_residual,
    give_nan,
]


def damaged(
    exported: Exported, directory: Path, damage: Damage, role: str = "decoder", **more: str
) -> Runner:
    return runner_for(exported, directory, changed(exported, directory, damage, role, **more))


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_graph_is_caught(
    damage: Damage, llama: Exported, llama_answers: Answers, tmp_path: Path
) -> None:
    runner = damaged(llama, tmp_path, damage)
    with pytest.raises(VerificationError, match="doesn't compute what PyTorch computes"):
        check_comparisons(compare(runner, *llama_answers), "fp32", PRECISIONS["fp32"].tolerance)


def test_an_undamaged_copy_passes(llama: Exported, llama_answers: Answers, tmp_path: Path) -> None:
    runner = damaged(llama, tmp_path, lambda model: None)
    assert (
        check_comparisons(compare(runner, *llama_answers), "fp32", PRECISIONS["fp32"].tolerance)
        < 1e-4
    )


def spoil_the_encoder(model: onnx.ModelProto) -> None:
    change_tensor(model, nodes(model, "Gemm")[0].input[1], lambda matrix: matrix[:, ::-1])


def test_a_damaged_encoder_is_caught(
    seq2seq: Exported, seq2seq_answers: Answers, tmp_path: Path
) -> None:
    runner = damaged(seq2seq, tmp_path, spoil_the_encoder, "encoder")
    with pytest.raises(VerificationError, match="cache of the source, keys of layer 0"):
        check_comparisons(compare(runner, *seq2seq_answers), "fp32", PRECISIONS["fp32"].tolerance)


def exchange_two_layers(model: onnx.ModelProto) -> None:
    first, second = nodes(model, "Linear")[0], nodes(model, "Linear")[4]
    for index in (1, 2):
        first.input[index], second.input[index] = second.input[index], first.input[index]


def test_a_damaged_integer_graph_is_caught(
    llama: Exported, llama_answers: Answers, tmp_path: Path
) -> None:
    runner = damaged(llama, tmp_path, exchange_two_layers, precision="quill4")
    with pytest.raises(VerificationError, match="the quill4 graph"):
        check_comparisons(compare(runner, *llama_answers), "quill4", PRECISIONS["quill4"].tolerance)


def test_a_difference_is_measured_in_spreads_of_its_position() -> None:
    expected = np.array([[0.0, 2.0], [0.0, 20.0]])
    found = np.array([[0.0, 2.5], [1.0, 20.0]])
    differences = Comparison("here", found, expected).differences()
    np.testing.assert_allclose(differences, [0.5, 0.1])
