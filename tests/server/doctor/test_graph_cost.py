"""What a step reads and multiplies, counted from the graph."""

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from quill.server.doctor.graph_cost import count_cost
from tests.operators import SERVED
from tests.server.tiny_bundle import TinyBundle


@pytest.mark.parametrize("precision", SERVED)
def test_the_products_are_those_of_the_networks_matrices(
    tiny_bundle: TinyBundle, precision: str
) -> None:
    sizes = tiny_bundle.manifest.sizes
    heads = (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_size
    out = sizes.num_heads * sizes.head_size
    of_layer = sizes.d_model * (heads + out + 3 * sizes.d_ff)
    cost = count_cost(tiny_bundle.directory / f"decoder.{precision}.onnx")
    assert cost.products_token == sizes.num_layers * of_layer
    assert cost.products_logit == sizes.d_model * sizes.vocab_size
    numbers = cost.products_token + cost.products_logit
    weights = (tiny_bundle.directory / f"weights.{precision}.bin").stat().st_size
    if precision == "fp32":
        assert cost.weight_bytes == 4 * numbers
    assert numbers / 2 < cost.weight_bytes <= weights


def test_of_experts_only_those_of_a_token_count(tmp_path: Path) -> None:
    """Behind the selection of tokens that need logits, too."""
    up, down = ([4, 1000], [4, 500])
    weights = [
        helper.make_tensor(name, TensorProto.UINT8, dims, bytes(dims[0] * dims[1]), raw=True)
        for name, dims in (("up", up), ("down", down))
    ]
    nodes = [
        helper.make_node("Gather", ["x", "logit_indices"], ["some"]),
        helper.make_node("Experts", ["x", "router", "up", "down"], ["y"], domain="quill"),
        helper.make_node("Experts", ["some", "", "up", "down"], ["z"], domain="quill"),
    ]
    numbers = {"inputs": 32, "d_expert": 16, "number": 4, "per_token": 2}
    for node in nodes[1:]:
        node.attribute.extend(helper.make_attribute(*each) for each in numbers.items())
    graph = helper.make_graph(nodes, "experts", [], [], weights)
    path = tmp_path / "experts.onnx"
    onnx.save(helper.make_model(graph), path)
    products = 3 * 32 * 16 * 2
    assert count_cost(path) == (2 * 1500 * 4 // 2, products, products)
