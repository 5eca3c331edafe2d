"""The CUDA provider's kernels, checked without a GPU."""

import dataclasses
from pathlib import Path

import onnx_ir as ir
import pytest

from quill.export.errors import UnsupportedModelError
from quill.export.graph.cuda_kernels import check_cuda_kernels
from quill.export.graph.prepare import Networks
from quill.export.graph.trace import trace
from quill.model.network.config import ModelConfig
from tests.export.tiny import Exported, make_checkpoint
from tests.tiny_networks import GPT, LLAMA


def load(exported: Exported, precision: str) -> ir.Model:
    return ir.load(exported.directory / f"decoder.{precision}.onnx")


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_every_node_of_a_half_precision_graph_has_a_kernel(
    family: str, request: pytest.FixtureRequest
) -> None:
    check_cuda_kernels(load(request.getfixturevalue(family), "fp16"))


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(GPT, activation="gelu"),
        dataclasses.replace(GPT, activation="silu", norm_placement="post"),
        dataclasses.replace(GPT, activation="relu", output_bias=True),
        dataclasses.replace(LLAMA, positions="sinusoidal", scale_embeddings=True),
        dataclasses.replace(
            LLAMA, qk_norm="head", attention_soft_cap=20.0, logit_soft_cap=10.0, activation="geglu"
        ),
    ],
    ids=["gelu", "silu", "relu", "sinusoidal", "what came after"],
)
def test_other_settings_have_kernels_too(config: ModelConfig, tmp_path: Path) -> None:
    graph = Networks(make_checkpoint(config), tmp_path).prepare("fp16").decoder("cuda")
    assert graph is not None
    check_cuda_kernels(trace(graph))


def test_full_precision_attention_is_refused(llama: Exported) -> None:
    model = load(llama, "fp16")
    attention = next(node for node in model.graph if node.op_type == "PagedAttention")
    attention.inputs[0].dtype = ir.DataType.FLOAT  # type: ignore[union-attr]
    with pytest.raises(UnsupportedModelError, match="PagedAttention takes no float,"):
        check_cuda_kernels(model)


def test_an_operator_without_a_kernel_is_refused_by_name(llama: Exported) -> None:
    model = load(llama, "fp16")
    next(node for node in model.graph if node.op_type == "Sigmoid").op_type = "Swish"
    with pytest.raises(UnsupportedModelError, match="no kernel for Swish"):
        check_cuda_kernels(model)
    with pytest.raises(UnsupportedModelError, match="no kernel for Attention"):
        check_cuda_kernels(load(llama, "fp32"))
