"""The graphs: one clean node for each idea, the documented names, nothing of this machine."""

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

from quill.export.bundle import graph_contract
from quill.export.graph.prepare import Networks
from quill.export.verify.runner import Runner
from quill.model.network.config import ModelConfig
from tests.export.tiny import Exported, export, make_checkpoint
from tests.operators import SERVED, needs_operators
from tests.tiny_networks import LLAMA, SEQ2SEQ

FLOAT, INT32, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32, onnx.TensorProto.INT64


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
        "Gather": 3,  # the embedding, and the positions whose logits, or hidden states, are wanted
        "RMSNormalization": 5,
        "Gemm": 9,
        "Attention": 2,
        "Split": 2,  # SwiGLU's gate and value
        "Sigmoid": 2,
        "Mul": 4,
        "Add": 4,
    }


@needs_operators
def test_in_integers_it_is_fewer_still(llama: Exported) -> None:
    found = operators(load(llama, precision="quill4"))
    # The norm is that of the hidden states that are shown: the projection's is its own.
    shown = {"Gather": 2, "RMSNormalization": 1}
    assert found == {"Embedding": 1, "Linear": 9, "Attention": 2, **shown}


def test_an_encoder_is_as_few_nodes_as_it_has_ideas(encoder: Exported) -> None:
    assert operators(load(encoder, "encoder")) == {
        "Gather": 4,  # embeddings of tokens, positions and segments, and what is hidden
        "Add": 6,
        "LayerNormalization": 6,  # of the embeddings, two a layer, the head's
        "Gemm": 10,
        "EncoderAttention": 2,
        "Gelu": 3,
    }


def test_an_encoders_graph_has_the_documented_names_and_shapes(encoder: Exported) -> None:
    assert list(values(load(encoder, "encoder").graph).items()) == [
        ("input_ids", (INT64, ["tokens"])),
        ("positions", (INT64, ["tokens"])),
        ("query_starts", (INT32, ["starts"])),
        ("logit_indices", (INT64, ["num_logits"])),
        ("segments", (INT64, ["tokens"])),
        ("hidden", (FLOAT, ["tokens", 64])),
        ("logits", (FLOAT, ["num_logits", 272])),
    ]
    assert [graphs.decoder for graphs in encoder.manifest.graphs] == [None] * len(SERVED)


def test_a_translator_is_as_few_nodes_as_it_has_ideas(seq2seq: Exported) -> None:
    decoder, encoder = operators(load(seq2seq)), operators(load(seq2seq, "encoder"))
    assert decoder == {
        "Gather": 3,  # as above, and the table of positions
        "Mul": 1,  # embeddings are scaled
        "Add": 7,
        "LayerNormalization": 6,
        "Gemm": 13,
        "Attention": 2,
        "CrossAttention": 2,
        "Relu": 2,
    }
    assert encoder == {
        "Gather": 2,
        "Mul": 1,
        "Add": 3,
        "LayerNormalization": 2,
        "Gemm": 6,
        "EncoderAttention": 1,
        "Relu": 1,
        "Split": 2,  # each decoder layer's keys and values
        "Store": 2,
    }


def values(graph: onnx.GraphProto) -> dict[str, tuple[int, list[str | int]]]:
    """The type and the shape of each input and output, in their order."""
    found = {}
    for value in (*graph.input, *graph.output):
        tensor = value.type.tensor_type
        found[value.name] = tensor.elem_type, [d.dim_param or d.dim_value for d in tensor.shape.dim]
    return found


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_inputs_and_outputs_have_the_documented_names_and_shapes(
    family: str, request: pytest.FixtureRequest
) -> None:
    """Positions are there as well where nothing but a rotary table would need them."""
    exported: Exported = request.getfixturevalue(family)
    heads = exported.manifest.sizes.num_kv_heads
    keys, values_ = ["num_blocks", heads, 16, 16], ["num_blocks", heads, 16, 16]
    assert list(values(load(exported).graph).items()) == [
        ("input_ids", (INT64, ["tokens"])),
        ("positions", (INT64, ["tokens"])),
        ("query_starts", (INT32, ["starts"])),
        ("past_lengths", (INT32, ["sequences"])),
        ("block_table", (INT32, ["sequences", "most_blocks"])),
        ("logit_indices", (INT64, ["num_logits"])),
        ("key_cache_0", (FLOAT, keys)),
        ("value_cache_0", (FLOAT, values_)),
        ("key_cache_1", (FLOAT, keys)),
        ("value_cache_1", (FLOAT, values_)),
        ("hidden_indices", (INT64, ["num_hidden"])),
        ("logits", (FLOAT, ["num_logits", 272])),
        ("hidden", (FLOAT, ["num_hidden", 64])),
        ("new_key_cache_0", (FLOAT, keys)),
        ("new_value_cache_0", (FLOAT, values_)),
        ("new_key_cache_1", (FLOAT, keys)),
        ("new_value_cache_1", (FLOAT, values_)),
    ]


def test_keys_lie_transposed_inside_a_block(tmp_path: Path) -> None:
    config = dataclasses.replace(LLAMA, head_size=32)
    graph = Networks(make_checkpoint(config), tmp_path).prepare("fp32").decoder("cpu")
    assert graph is not None
    keys, its_values = graph.arguments[6][:2]
    assert (keys.shape[1:], its_values.shape[1:]) == ((2, 32, 16), (2, 16, 32))


def test_a_seq2seq_model_has_two_graphs_with_the_documented_names(seq2seq: Exported) -> None:
    decoder, encoder = values(load(seq2seq).graph), values(load(seq2seq, "encoder").graph)
    caches = graph_contract.cache_names(2)
    extended = [f"new_{name}" for name in caches]
    step = ["input_ids", "positions", "query_starts", "past_lengths", "block_table"]
    source = ["source_lengths", "source_table"]
    assert list(decoder) == [*step, "logit_indices", *caches, *source, "logits", *extended]
    assert decoder["source_lengths"] == (INT32, ["sequences"])
    assert decoder["source_table"] == (INT32, ["sequences", "most_source_blocks"])
    inputs = ["source_ids", "positions", "query_starts", "block_table"]
    assert list(encoder) == [*inputs, *caches, *extended]
    assert encoder["source_ids"] == (INT64, ["tokens"])


def test_cross_attention_reads_the_pool_that_attention_wrote(seq2seq: Exported) -> None:
    """Or the runtime might read before it is written, or from a copy."""
    graph = load(seq2seq).graph
    cross_attentions = [node for node in graph.node if node.op_type == "CrossAttention"]
    assert [list(node.input[1:3]) for node in cross_attentions] == [
        [f"new_key_cache_{i}", f"new_value_cache_{i}"] for i in range(2)
    ]


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


@pytest.mark.parametrize("precision", SERVED)
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


def test_half_precision_has_blocks_for_a_card_and_answers_in_float32(gpt: Exported) -> None:
    found = values(load(gpt, precision="fp16").graph)
    blocks = (onnx.TensorProto.FLOAT16, ["num_blocks", 256, 4, 16])
    assert found["key_cache_0"] == found["new_value_cache_1"] == blocks
    assert found["logits"] == (FLOAT, ["num_logits", 272])
    shown = {"hidden_indices", "hidden"}  # on the CPU only
    assert list(found) == [name for name in values(load(gpt).graph) if name not in shown]


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(SEQ2SEQ, positions="rotary", norm="rms", num_kv_heads=2),
        dataclasses.replace(SEQ2SEQ, positions="learned", activation="swiglu", head_size=48),
        dataclasses.replace(LLAMA, positions="sinusoidal", scale_embeddings=True, head_size=256),
        dataclasses.replace(SEQ2SEQ, positions="none", relative_buckets=8, relative_distance=20),
    ],
    ids=["rotary and grouped translator", "learned positions", "wide heads", "bias by distance"],
)
def test_other_settings_compute_what_pytorch_computes(config: ModelConfig, tmp_path: Path) -> None:
    """The proof refuses them if not."""
    found = export(tmp_path / "bundle", make_checkpoint(config), "fp32").manifest.graphs[0]
    assert found.invariance is not None
    assert found.invariance.holds
