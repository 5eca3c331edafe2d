"""The operators Linear and Embedding: the source's values, batch invariance, no crashes."""

from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from quill.export.graph.graphs import Graph
from quill.export.graph.quill_layers import CustomEmbedding, CustomLinear
from quill.export.graph.trace import trace
from quill.export.quantize.quill_layout import InputBits, OperatorWeight, lay_out
from quill.export.verify.runner import Array, open_session
from quill.model.checkpoint.quantized_weight import FORMATS, Kind, stack_rows
from tests.export.operators.custom_kernels import (
    FLOAT,
    check_all_kernels_agree,
    save_operator,
)
from tests.operators import needs_operators
from tests.random_weights import random_rows, random_weight

pytestmark = [needs_operators, pytest.mark.portable]

KINDS: tuple[Kind, ...] = get_args(Kind)
CASES: list[tuple[Kind, InputBits]] = [(kind, bits) for bits in (16, 8) for kind in KINDS]


def make_weight(
    kind: Kind, input_bits: InputBits, num_outputs: int, num_inputs: int
) -> OperatorWeight:
    return OperatorWeight(random_weight(kind, num_outputs, num_inputs), input_bits)


def normal(num_rows: int, width: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).standard_normal((num_rows, width)).astype(np.float32)


def exactly_rounded(num_rows: int, num_inputs: int, bits: int = 8) -> Array:
    """Whole numbers of steps, with the largest number of them in each block: rounding leaves them
    as they are."""
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
@pytest.mark.parametrize(("kind", "input_bits"), CASES)
def test_a_custom_layer_multiplies_with_the_sources_values(
    kind: Kind, input_bits: InputBits, num_outputs: int, tmp_path: Path
) -> None:
    width = 3 * FORMATS[kind].size
    of, bias = make_weight(kind, input_bits, num_outputs, width), torch.randn(num_outputs)
    x = exactly_rounded(7, width, input_bits)
    expected = (torch.from_numpy(x) @ of.weight.dequantize().T + bias).numpy()
    found = run(save(CustomLinear(of, bias), tmp_path, x), x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-3)


def test_a_norm_a_residual_and_a_gate_are_computed_as_pytorch_does(tmp_path: Path) -> None:
    """Inputs in blocks of equal size: what the norm leaves of them is rounded exactly again."""
    of = make_weight("q4_1", 8, 64, 96)
    norm = nn.RMSNorm(96, eps=1e-5)
    x = exactly_rounded(5, 96)
    linear = CustomLinear(of)
    linear.take_norm(norm)
    residual = normal(5, 64)
    expected = norm(torch.from_numpy(x)) @ of.weight.dequantize().T + torch.from_numpy(residual)
    found = run(save(Summed(linear), tmp_path, x, residual), x, residual)
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-5, atol=1e-4)
    gated = CustomLinear(of, gated=True)
    gated.take_norm(norm)
    gate, value = (norm(torch.from_numpy(x)) @ of.weight.dequantize().T).chunk(2, dim=-1)
    expected = nn.functional.silu(gate) * value
    found = run(save(gated, tmp_path, x), x)
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("kind", "input_bits"), CASES)
def test_a_row_gets_the_same_bits_alone_and_batched(
    kind: Kind, input_bits: InputBits, gated: bool, tmp_path: Path
) -> None:
    linear = CustomLinear(make_weight(kind, input_bits, 1600, 256), gated=gated)
    linear.take_norm(nn.RMSNorm(256, eps=1e-5))
    x = normal(300, 256)  # more than are rounded at a time
    path = save(linear, tmp_path, x)
    batched = run(path, x)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 8, 13, 32, 257):
        for num_threads in (1, 2):
            found = run(path, x[-num_rows:], num_threads=num_threads)
            np.testing.assert_array_equal(found, batched[-num_rows:])


@pytest.mark.parametrize(("kind", "input_bits"), CASES)
def test_all_kernels_compute_the_same_bits(
    kind: Kind, input_bits: InputBits, tmp_path: Path
) -> None:
    """An odd number of groups, unless they gate each other."""
    gated = kind in ("q4_1", "q6_k")
    linear = CustomLinear(make_weight(kind, input_bits, 96 if gated else 100, 512), gated=gated)
    linear.take_norm(nn.RMSNorm(512, eps=1e-5))
    x = normal(9, 512)
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
    linear = CustomLinear(make_weight("q4_1", 8, 64, 96))
    x = normal(5, 96)
    path = save(linear, tmp_path, x)
    good = run(path, x)
    x[2, 40] = bad
    found = run(path, x)
    assert not np.isfinite(found[2]).any()
    others = [0, 1, 3, 4]
    np.testing.assert_array_equal(found[others], good[others])


def test_no_rows_give_no_rows(tmp_path: Path) -> None:
    path = save(CustomLinear(make_weight("q8_0", 16, 48, 96)), tmp_path, normal(2, 96))
    assert run(path, normal(0, 96)).shape == (0, 48)


@pytest.mark.parametrize("kind", KINDS)
def test_a_custom_embedding_gives_back_the_sources_rows_exactly(kind: Kind, tmp_path: Path) -> None:
    weight = random_weight(kind, 50, 2 * FORMATS[kind].size)
    path = save(CustomEmbedding(OperatorWeight(weight, 16)), tmp_path, np.zeros((2,), np.int64))
    ids = np.array([0, 5, 49, 5, 16])
    np.testing.assert_array_equal(run(path, ids), weight.dequantize().numpy()[ids])
    for beyond in (50, -1, 2**40):
        with pytest.raises(Exception, match="an id beyond the vocabulary"):
            run(path, np.array([0, beyond]))


@pytest.mark.parametrize("gated", [True, False])
def test_rows_of_several_kinds_are_as_many_operators(gated: bool, tmp_path: Path) -> None:
    parts = [random_rows("q5_0", 32, 256), random_rows("q8_0", 16, 256)]
    parts += [random_rows("q6_k", 16, 256)]
    of = OperatorWeight(stack_rows(parts), 8)
    bias = None if gated else torch.randn(64)
    x, residual = exactly_rounded(5, 256), normal(5, 32 if gated else 64)
    expected = torch.from_numpy(x) @ of.weight.dequantize().T
    if gated:
        expected = nn.functional.silu(expected[:, :32]) * expected[:, 32:]
    elif bias is not None:
        expected = expected + bias
    expected = expected + torch.from_numpy(residual)
    path = save(Summed(CustomLinear(of, bias, gated=gated)), tmp_path, x, residual)
    found = run(path, x, residual)
    # Weights and biases are constants, not computed.
    operators = [node.op_type for node in ir.load(path).graph]
    assert operators.count("Linear") == 3
    assert ("Split" in operators) == gated
    # Inputs of 16 bits, beside weights of 8, are rounded a little.
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-4 * float(expected.std()))


def test_records_take_as_many_bits_as_they_should() -> None:
    bits = {kind: 8 * lay_out(random_rows(kind, 32, 512)).numel() / (32 * 512) for kind in KINDS}
    assert bits == {
        **{"q4_0": 4.5, "q4_1": 5.0, "q5_0": 5.5, "q5_1": 6.0, "q8_0": 8.5},
        **{"q4_k": 4.625, "q5_k": 5.625, "q6_k": 6.5625, "mxfp4": 4.5},
    }


def hand_made(directory: Path, **changes: Any) -> Path:
    """A graph of one operator that the exporter wouldn't write."""
    attributes = {"inputs": 96, "columns": 48, "layout": 4, "gated": 0, "epsilon": 1e-5}
    attributes["input_bits"] = 16
    records = np.zeros(changes.pop("num_bytes", 3 * 3 * 544), np.uint8)
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
        ({"layout": 8}, "no such matrix"),
        ({"layout": -1}, "no such matrix"),
        ({"layout": 7}, "no such matrix"),
        ({"layout": 0, "input_bits": 4}, "no such matrix"),
        ({"layout": 0, "input_bits": 8}, "weights of another size"),
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
