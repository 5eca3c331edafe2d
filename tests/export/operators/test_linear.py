"""The operators Linear and Embedding: the source's values, batch invariance, no crashes."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from quill.export.graph.graphs import Graph
from quill.export.graph.quill_layers import CustomEmbedding, CustomLinear
from quill.export.graph.trace import trace
from quill.export.quantize.quill_layout import lay_out, with_halves
from quill.export.verify.runner import Array, open_session
from quill.model.checkpoint.quantized_weight import Kind, QuantizedWeight
from tests.export.operators.custom_kernels import (
    FLOAT,
    check_all_kernels_agree,
    save_operator,
)
from tests.operators import needs_operators

pytestmark = [needs_operators, pytest.mark.portable]

KINDS: list[Kind] = ["q4_0", "q4_1", "q8_0", "q8_1"]


def make_weight(kind: Kind, num_outputs: int, num_inputs: int, seed: int = 0) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_outputs, num_inputs // 32)
    scale = (torch.rand(shape, generator=generator) * 0.1 + 0.01).half().float()
    minimum = (-scale * 7.3).half().float() if kind in ("q4_1", "q8_1") else None
    if kind in ("q8_0", "q8_1"):
        q = torch.randint(-128, 128, (num_outputs, num_inputs), generator=generator)
        return QuantizedWeight(kind, q.to(torch.int8), scale, minimum)
    q = torch.randint(0, 256, (num_outputs, num_inputs // 2), generator=generator).to(torch.uint8)
    return QuantizedWeight(kind, q, scale, minimum)


def normal(num_rows: int, width: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).standard_normal((num_rows, width)).astype(np.float32)


def exactly_rounded(num_rows: int, num_inputs: int, bits: int = 8) -> Array:
    """Whole numbers of steps, with the largest number of them in each block: rounding leaves them
    as they are. 8-bit weights meet inputs of 16 bits, others inputs of 8."""
    most = 2 ** (bits - 1) - 1
    x = np.random.default_rng(1).integers(-most, most, (num_rows, num_inputs)).astype(np.float32)
    x[:, ::32] = most
    return x * np.float32(2.0 ** (8 - bits))


class Summed(nn.Module):
    """A linear layer with what it adds its products to."""

    def __init__(self, linear: CustomLinear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        y: Tensor = self.linear(x, residual)
        return y


def save(module: nn.Module, directory: Path, *arguments: Array) -> Path:
    rows = Dim("rows")
    graph = Graph(
        # Inside another module: torch.export miscounts the root's own buffers when some are None.
        module=(module if isinstance(module, Summed) else nn.Sequential(module)).eval(),
        arguments=tuple(torch.from_numpy(each[:2]) for each in arguments),
        dynamic_shapes=tuple({0: rows} for _ in arguments),
        input_names=["x", "residual"][: len(arguments)],
        output_names=["y"],
    )
    path = directory / "module.onnx"
    ir.save(trace(graph), path)
    return path


def run(path: Path, *arguments: Array, num_threads: int = 2) -> Array:
    session = open_session(path, num_threads)
    names = [each.name for each in session.get_inputs()]
    (y,) = session.run(None, dict(zip(names, arguments, strict=True)))
    assert isinstance(y, np.ndarray)
    return y


# More columns than fill their groups, an odd number of groups, fewer columns than one group.
@pytest.mark.parametrize("num_outputs", [50, 48, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_custom_layer_multiplies_with_the_sources_values(
    kind: Kind, num_outputs: int, tmp_path: Path
) -> None:
    weight, bias = make_weight(kind, num_outputs, 96), torch.randn(num_outputs)
    x = exactly_rounded(7, 96, bits=16 if weight.bits == 8 else 8)
    expected = (torch.from_numpy(x) @ weight.dequantize().T + bias).numpy()
    found = run(save(CustomLinear(weight, bias), tmp_path, x), x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-3)


def test_scales_that_16_bits_cannot_hold_are_kept_in_32(tmp_path: Path) -> None:
    weight = make_weight("q4_1", 48, 96)
    odd = QuantizedWeight("q4_1", weight.q, weight.scale_NG * 1.0001, weight.minimum_NG)
    assert lay_out(weight).halves
    assert not lay_out(odd).halves
    x = exactly_rounded(3, 96)
    expected = (torch.from_numpy(x) @ odd.dequantize().T).numpy()
    found = run(save(CustomLinear(odd), tmp_path, x), x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-3)


def test_scales_made_here_are_rounded_to_16_bits_unless_that_loses_them() -> None:
    weight = make_weight("q4_1", 48, 96)
    odd = QuantizedWeight("q4_1", weight.q, weight.scale_NG * 1.0001, weight.minimum_NG)
    assert lay_out(with_halves(odd)).halves
    torch.testing.assert_close(with_halves(odd).dequantize(), odd.dequantize(), rtol=0, atol=1e-2)
    assert weight.minimum_NG is not None
    tiny = QuantizedWeight("q4_1", weight.q, weight.scale_NG * 1e-6, weight.minimum_NG * 1e-6)
    assert with_halves(tiny) is tiny


def test_a_norm_a_residual_and_a_gate_are_computed_as_pytorch_does(tmp_path: Path) -> None:
    """Inputs in blocks of equal size: what the norm leaves of them is rounded exactly again."""
    weight = make_weight("q4_1", 64, 96)
    norm = nn.RMSNorm(96, eps=1e-5)
    x = exactly_rounded(5, 96)
    linear = CustomLinear(weight)
    linear.take_norm(norm)
    residual = normal(5, 64)
    expected = norm(torch.from_numpy(x)) @ weight.dequantize().T + torch.from_numpy(residual)
    found = run(save(Summed(linear), tmp_path, x, residual), x, residual)
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-5, atol=1e-4)
    gated = CustomLinear(weight, gated=True)
    gated.take_norm(norm)
    gate, value = (norm(torch.from_numpy(x)) @ weight.dequantize().T).chunk(2, dim=-1)
    expected = nn.functional.silu(gate) * value
    found = run(save(gated, tmp_path, x), x)
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "gated"), [("q4_1", True), ("q4_1", False), ("q8_0", False), ("q8_1", False)]
)
def test_a_row_gets_the_same_bits_alone_and_batched(
    kind: Kind, gated: bool, tmp_path: Path
) -> None:
    linear = CustomLinear(make_weight(kind, 1600, 192), gated=gated)
    linear.take_norm(nn.RMSNorm(192, eps=1e-5))
    x = normal(300, 192)  # more than are rounded at a time
    path = save(linear, tmp_path, x)
    batched = run(path, x)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 8, 13, 32, 257):
        for num_threads in (1, 2):
            found = run(path, x[-num_rows:], num_threads=num_threads)
            np.testing.assert_array_equal(found, batched[-num_rows:])


@pytest.mark.parametrize(("kind", "gated"), [("q4_1", True), ("q8_0", False), ("q8_1", True)])
def test_all_kernels_compute_the_same_bits(kind: Kind, gated: bool, tmp_path: Path) -> None:
    linear = CustomLinear(make_weight(kind, 96, 192), gated=gated)
    linear.take_norm(nn.RMSNorm(192, eps=1e-5))
    x = normal(9, 192)
    x[3] *= 1e-35  # next to nothing
    x[4] *= 1e30
    x[5] = 0
    x[6, 7], x[7, 8] = np.inf, np.nan
    path = save(linear, tmp_path, x)
    plain = check_all_kernels_agree(path, {"x": x})
    assert np.isfinite(plain[[0, 1, 2, 3, 4, 5, 8]]).all()
    assert np.isnan(plain[6:8]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_spoils_no_other_and_is_not_hidden(
    bad: float, tmp_path: Path
) -> None:
    linear = CustomLinear(make_weight("q4_1", 64, 96))
    x = normal(5, 96)
    path = save(linear, tmp_path, x)
    good = run(path, x)
    x[2, 40] = bad
    found = run(path, x)
    assert not np.isfinite(found[2]).any()
    others = [0, 1, 3, 4]
    np.testing.assert_array_equal(found[others], good[others])


def test_no_rows_give_no_rows(tmp_path: Path) -> None:
    path = save(CustomLinear(make_weight("q8_0", 48, 96)), tmp_path, normal(2, 96))
    assert run(path, normal(0, 96)).shape == (0, 48)


def test_a_custom_embedding_gives_back_the_sources_rows_exactly(tmp_path: Path) -> None:
    weight = make_weight("q8_0", 50, 96)
    path = save(CustomEmbedding(weight), tmp_path, np.zeros((2,), np.int64))
    ids = np.array([0, 5, 49, 5, 16])
    np.testing.assert_array_equal(run(path, ids), weight.dequantize().numpy()[ids])
    for beyond in (50, -1, 2**40):
        with pytest.raises(Exception, match="an id beyond the vocabulary"):
            run(path, np.array([0, beyond]))


def hand_made(directory: Path, **changes: Any) -> Path:
    """A graph of one operator that the exporter wouldn't write."""
    attributes = {"inputs": 96, "columns": 48, "bits": 8, "halves": 0, "gated": 0, "epsilon": 1e-5}
    records = np.zeros(changes.pop("num_bytes", 3 * 3 * 576), np.uint8)
    gains = np.ones(changes.pop("num_gains", 96), np.float32)
    constant = changes.pop("constant", True)
    changes.pop("width", None)  # of the inputs
    inputs = {"x": FLOAT, "residual": FLOAT}
    if not constant:  # an input with a default value can be given another
        inputs["gains"] = FLOAT
    names = ["x", "records", "gains", "residual"]
    constants = {"records": records, "gains": gains}
    return save_operator(
        directory, "Linear", names, inputs, {"y": FLOAT}, constants, attributes | changes
    )


def test_a_graph_made_by_hand_runs(tmp_path: Path) -> None:
    residual = normal(2, 48)
    np.testing.assert_array_equal(
        run(hand_made(tmp_path), np.zeros((2, 96), np.float32), residual), residual
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inputs": 95}, "no such matrix"),
        ({"inputs": -32}, "no such matrix"),
        ({"columns": 0}, "no such matrix"),
        ({"columns": 2**40}, "no such matrix"),
        ({"bits": 5}, "no such matrix"),
        ({"bits": 32}, "no such matrix"),
        ({"gated": 1}, "no such matrix"),
        ({"num_bytes": 1000}, "weights of another size"),
        ({"num_gains": 95}, "weights of another size"),
        ({"width": 64}, "inputs of another width"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_errors_not_crashes(
    changes: dict[str, int], words: str, tmp_path: Path
) -> None:
    width = changes.get("width", 96)
    with pytest.raises(Exception, match=words):
        run(hand_made(tmp_path, **changes), normal(2, width), normal(2, 48))


def test_weights_that_are_no_constants_are_refused(tmp_path: Path) -> None:
    """They could have another size in every step."""
    session = open_session(hand_made(tmp_path, constant=False))
    given = {"x": normal(2, 96), "residual": normal(2, 48), "gains": np.ones(96, np.float32)}
    with pytest.raises(Exception, match="weights that aren't constants"):
        session.run(None, given)


def test_a_residual_of_another_size_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="a residual of another size"):
        run(hand_made(tmp_path), normal(2, 96), normal(1, 48))
