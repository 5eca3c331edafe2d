"""Integer weights: the operators compute with the very values that the source had."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from quill.export.graph.graphs import Graph
from quill.export.graph.nbits_layers import PackedEmbedding, PackedLinear
from quill.export.graph.trace import trace
from quill.export.quantise.nbits_layout import (
    Packed,
    beside,
    in_halves,
    integer_zero_points,
    kernel_weights,
    pack,
)
from quill.export.verify.runner import Array, open_session
from quill.model.checkpoint.quantised_weight import Kind, QuantisedWeight

NUM_INPUTS, NUM_OUTPUTS = 96, 48


def make_weight(kind: Kind, seed: int = 0) -> QuantisedWeight:
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_OUTPUTS, NUM_INPUTS // 32)
    scale = (torch.rand(shape, generator=generator) * 0.1 + 0.01).half().float()
    if kind == "q8_0":
        q = torch.randint(-127, 128, (NUM_OUTPUTS, NUM_INPUTS), generator=generator).to(torch.int8)
        return QuantisedWeight(kind, q, scale)
    size = (NUM_OUTPUTS, NUM_INPUTS // 2)
    q = torch.randint(0, 256, size, generator=generator).to(torch.uint8)
    minimum = (-scale * 7.3).half().float() if kind == "q4_1" else None
    return QuantisedWeight(kind, q, scale, minimum)


def exactly_rounded(num_rows: int, seed: int = 1) -> Array:
    """Whole numbers with a 127 in each block: rounding to 8 bits leaves them as they are."""
    x = np.random.default_rng(seed).integers(-126, 127, (num_rows, NUM_INPUTS)).astype(np.float32)
    x[:, ::32] = 127
    return x


def run(module: nn.Module, x: Array, tmp_path: Path) -> Array:
    """What the runtime computes for a module, in float32."""
    graph = Graph(
        # Inside another module: torch.export miscounts the root's own buffers when some are None.
        module=nn.Sequential(module).eval(),
        arguments=(torch.from_numpy(x[:2]),),
        dynamic_shapes=({0: Dim("rows")},),
        input_names=["x"],
        output_names=["y"],
    )
    ir.save(trace(graph), tmp_path / "module.onnx")
    (y,) = open_session(tmp_path / "module.onnx", num_threads=1).run(None, {"x": x})
    assert isinstance(y, np.ndarray)
    return y


KINDS: list[Kind] = ["q4_0", "q4_1", "q8_0"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_layer_multiplies_with_the_sources_values(kind: Kind, tmp_path: Path) -> None:
    weight, bias = make_weight(kind), torch.randn(NUM_OUTPUTS)
    x = exactly_rounded(5)
    expected = (torch.from_numpy(x) @ weight.dequantise().T + bias).numpy()
    found = run(PackedLinear(weight, bias), x, tmp_path)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-3)


def test_minima_that_are_multiples_of_their_scales_become_zero_points(tmp_path: Path) -> None:
    weight = make_weight("q4_1")
    zeros = torch.randint(0, 16, weight.scale_NG.shape)
    weight = QuantisedWeight("q4_1", weight.q, weight.scale_NG, -zeros * weight.scale_NG)
    found = integer_zero_points(weight)
    assert found is not None
    assert torch.equal(found, zeros.to(torch.uint8))
    assert beside(weight, None) is None
    x = exactly_rounded(3)
    expected = (torch.from_numpy(x) @ weight.dequantise().T).numpy()
    np.testing.assert_allclose(
        run(PackedLinear(weight), x, tmp_path), expected, rtol=1e-5, atol=1e-3
    )


@pytest.mark.parametrize("kind", KINDS)
def test_outliers_are_multiplied_without_rounding(kind: Kind, tmp_path: Path) -> None:
    """A huge input beside small ones: the kernel alone would lose the small ones."""
    weight, outliers = make_weight(kind), torch.tensor([3, 40])
    x = np.random.default_rng(0).standard_normal((4, NUM_INPUTS)).astype(np.float32)
    x[:, outliers] *= 1000
    expected = (torch.from_numpy(x) @ weight.dequantise().T).numpy()
    found = run(PackedLinear(weight, outliers_O=outliers), x, tmp_path)
    # Rounded with a neighbour of 1000, each of the 30 others of a block would err by up to 4.
    assert np.abs(found - expected).max() < weight.dequantise().abs().max()


def test_a_packed_embedding_gives_back_the_sources_rows_exactly(tmp_path: Path) -> None:
    weight = make_weight("q8_0")
    graph = Graph(
        module=PackedEmbedding(weight).eval(),
        arguments=(torch.zeros(2, 3, dtype=torch.int64),),
        dynamic_shapes=({0: Dim("rows"), 1: Dim("tokens")},),
        input_names=["ids"],
        output_names=["x"],
    )
    ir.save(trace(graph), tmp_path / "module.onnx")
    ids = np.array([[0, 5, 47, 5]])
    (found,) = open_session(tmp_path / "module.onnx").run(None, {"ids": ids})
    np.testing.assert_array_equal(found, weight.dequantise().numpy()[ids])


def unpacked(packed: Packed, bits: int) -> Tensor:
    """The operator's documented meaning, element by element."""
    q = packed.q_NGB
    if bits == 4:
        q = torch.stack((q & 15, q >> 4), dim=-1).flatten(2)
    middle = 8 if bits == 4 else 128
    return ((q.float() - middle) * packed.scale_NG.float().unsqueeze(-1)).flatten(1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_layout_means_what_the_operator_documents(kind: Kind) -> None:
    weight = make_weight(kind)
    found = unpacked(pack(weight), 8 if kind == "q8_0" else 4)
    torch.testing.assert_close(found, kernel_weights(weight))


def test_scales_become_halves_only_if_nothing_is_lost() -> None:
    halves = torch.tensor([[0.5, 0.1]]).half().float()
    assert in_halves(halves).dtype == torch.float16
    assert in_halves(torch.tensor([[0.5, 0.1]])).dtype == torch.float32
