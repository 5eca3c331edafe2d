"""The graphs for cards, as far as they can be seen without one."""

import os
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from quill.export.bundle.graph_contract import BLOCK, CUDA_BLOCK, cache_names
from quill.export.graph.attention import ATTENTION
from quill.export.graph.quill_layers import VERSION
from quill.export.operators.library import library_path
from tests.export.graph.paged_attention import Array, PagedAttention, paged_attention
from tests.export.tiny import Exported

NUM_BLOCKS = 6
TABLE = np.array([[4, 2], [1, 0], [5, 3]], np.int32)
# Three sequences in two steps: a chunk over the end of a block, a prompt, a few tokens.
PROMPTS = (60, 3, 20)
STEPS = ((59, 1, 7), (1, 2, 13))


@pytest.fixture(params=["llama", "gpt"])
def causal(request: pytest.FixtureRequest) -> Exported:
    bundle: Exported = request.getfixturevalue(request.param)
    return bundle


def load(exported: Exported) -> onnx.ModelProto:
    return onnx.load(exported.directory / "decoder.fp16.onnx")


def packed(rows: list[Array], past: Array) -> dict[str, Array]:
    lengths = [len(row) for row in rows]
    positions = [np.arange(first, first + n) for first, n in zip(past, lengths, strict=True)]
    return {
        "input_ids": np.concatenate(rows),
        "positions": np.concatenate(positions),
        "query_starts": np.cumsum([0, *lengths], dtype=np.int32),
        "past_lengths": past.astype(np.int32),
        "block_table": TABLE,
        "logit_indices": np.arange(sum(lengths)),
    }


def test_evaluated_by_the_schema_it_computes_what_pytorch_computes(causal: Exported) -> None:
    chance = np.random.default_rng(0)
    sizes = causal.manifest.sizes
    prompts = [chance.integers(0, sizes.vocab_size, length) for length in PROMPTS]
    evaluator = ReferenceEvaluator(load(causal), new_ops=[PagedAttention])
    names = cache_names(sizes.num_layers)
    shape = (NUM_BLOCKS, CUDA_BLOCK, sizes.num_kv_heads, sizes.head_size)
    caches: dict[str, Any] = {name: np.zeros(shape, np.float16) for name in names}
    past, found = np.zeros(3, np.int64), []
    for lengths in STEPS:
        rows = [p[a : a + n] for p, a, n in zip(prompts, past, lengths, strict=True)]
        logits, *extended = evaluator.run(None, packed(rows, past) | caches)
        found.append(np.split(logits, np.cumsum(lengths)[:-1]))
        caches = dict(zip(names, extended, strict=True))
        past += lengths
    model = causal.checkpoint.build()
    for prompt, *parts in zip(prompts, *found, strict=True):
        with torch.no_grad():
            expected = model(torch.from_numpy(prompt)[None])[0].numpy()
        np.testing.assert_allclose(np.concatenate(parts), expected, atol=0.02 * expected.std())


def refusal(model: onnx.ModelProto) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011 — the runtime's are of many kinds
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return str(caught.value)


def test_the_runtime_takes_all_of_it_but_has_no_kernel_here(causal: Exported) -> None:
    """It has taken types and shapes when, for want of a kernel, it tries single precision."""
    assert "InsertedPrecisionFreeCast" in refusal(load(causal))


def test_the_runtime_looks_at_the_types_before_that(causal: Exported) -> None:
    model = load(causal)
    table = next(value for value in model.graph.input if value.name == "block_table")
    table.type.tensor_type.elem_type = TensorProto.INT64
    message = refusal(model)
    assert "block_table" in message
    assert "InsertedPrecisionFreeCast" not in message


@pytest.mark.parametrize("is_rotary", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 16), (3, 3, 64), (8, 1, 80)])
def test_quills_own_attention_means_the_same(
    heads: int, kv_heads: int, size: int, is_rotary: bool
) -> None:
    """Over blocks of 16, which both can have here."""
    chance = np.random.default_rng(size)
    starts, past = np.array([0, 1, 18, 21], np.int32), np.array([37, 0, 14], np.int32)
    table = chance.permutation(15).reshape(3, 5).astype(np.int32)
    qkv = chance.standard_normal((21, (heads + 2 * kv_heads) * size)).astype(np.float32)
    keys, values = chance.standard_normal((2, 15, BLOCK, kv_heads, size)).astype(np.float16)
    angles = chance.uniform(0, 6, (64, size // 2))
    tables = [np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)]
    rotary = tables if is_rotary else []
    where = (starts, past, table)
    expected = paged_attention(
        qkv, keys, values, *where, *rotary, num_heads=heads, scale=size**-0.5
    )
    own = run_own(
        [qkv, keys.transpose(0, 2, 3, 1), values.transpose(0, 2, 1, 3), *where, *rotary],
        {"heads": heads, "kv_heads": kv_heads, "head_size": size, "scale": size**-0.5},
    )
    np.testing.assert_allclose(own[0], expected[0], atol=2e-3)
    np.testing.assert_allclose(own[1].transpose(0, 3, 1, 2), expected[1], atol=2e-3, rtol=2e-3)
    np.testing.assert_array_equal(own[2].transpose(0, 2, 1, 3), expected[2])


def run_own(inputs: list[Array], attributes: dict[str, Any]) -> list[Array]:
    names = [f"input_{i}" for i in range(len(inputs))]
    domain, operator = ATTENTION.split("::")
    outputs = ["attended", "keys", "values"]
    types = {"attended": TensorProto.FLOAT}
    graph = helper.make_graph(
        [helper.make_node(operator, names, outputs, domain=domain, **attributes)],
        "attention",
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(each.dtype), each.shape
            )
            for name, each in zip(names, inputs, strict=True)
        ],
        [
            helper.make_tensor_value_info(name, types.get(name, TensorProto.FLOAT16), None)
            for name in outputs
        ],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(domain, VERSION)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(os.fspath(library_path()))
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    given = [np.ascontiguousarray(each) for each in inputs]
    found: list[Array] = session.run(None, dict(zip(names, given, strict=True)))
    return found
