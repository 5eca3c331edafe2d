"""Finding integers for weights in full precision."""

import os
import subprocess
import sys

import pytest
import torch

from quill.export.quantize.quantizers import FoundKind, eight_bits, inputs_of, quantize, span_of
from quill.model.checkpoint.quantized_weight import FORMATS
from tests.random_weights import values_of

ROWS, COLUMNS = 40, 256
FOUND: tuple[FoundKind, ...] = ("q4_0", "q4_k", "q4_1", "q5_0", "q5_k", "q5_1")


def make_weight(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)) * 0.05


def make_moments(seed: int = 1) -> torch.Tensor:
    """Of inputs that depend on each other, as those of a network do."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(COLUMNS, COLUMNS, generator=generator) / COLUMNS**0.5
    x = torch.randn(1000, COLUMNS, generator=generator) @ (mixed + 0.5 * torch.eye(COLUMNS))
    moments_KCC: torch.Tensor = (x.T @ x / len(x)).unsqueeze(0)
    return moments_KCC


@pytest.mark.parametrize("kind", FOUND)
def test_weights_stay_near_and_as_they_are(kind: FoundKind) -> None:
    weight, before = make_weight(), make_weight()
    found = quantize(kind, weight)
    assert torch.equal(weight, before)
    assert found.weight.kind == kind
    assert found.weight.shape == weight.shape
    error = float((found.weight.dequantize() - weight).square().mean().sqrt() / weight.std())
    assert found.loss == pytest.approx(error**2, rel=0.01)
    # 16 levels over about four standard deviations leave an error of about a twelfth.
    assert 0.02 < error * 2 ** (FORMATS[kind].bits - 4) < 0.1


@pytest.mark.parametrize("kind", FOUND)
def test_weights_on_a_grid_are_found_again(kind: FoundKind) -> None:
    levels = 2 ** FORMATS[kind].bits
    steps = torch.arange(COLUMNS).mul(5).remainder(levels).repeat(ROWS, 1)
    steps[:, ::32], steps[:, 1::32] = 0, levels - 1
    weight = (steps - levels // 2) * 0.25
    found = quantize(kind, weight, inputs_of(make_moments())).weight.dequantize()
    torch.testing.assert_close(found, weight, atol=1e-2, rtol=0)


@pytest.mark.parametrize("kind", FOUND)
def test_blocks_of_equal_weights_stay_equal(kind: FoundKind) -> None:
    weight = make_weight()
    weight[:, :32], weight[:, 32:64] = 0, -0.25
    found = quantize(kind, weight).weight.dequantize()
    assert found[:, :32].abs().max() < 1e-6
    torch.testing.assert_close(found[:, 32:64], weight[:, 32:64], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", FOUND)
def test_errors_compensate_each_other_where_inputs_are_known(kind: FoundKind) -> None:
    weight, moments = make_weight(), make_moments()
    moments_II = moments[0]

    def lost(found: torch.Tensor) -> float:
        error = found - weight
        return float(((error @ moments_II) * error).sum())

    alone = lost(quantize(kind, weight).weight.dequantize())
    together = lost(quantize(kind, weight, inputs_of(moments)).weight.dequantize())
    assert together < 0.7 * alone


def test_inputs_that_are_always_zero_need_no_inverse() -> None:
    moments = make_moments()
    moments[:, :40], moments[:, :, :40] = 0, 0
    found = quantize("q4_0", make_weight(), inputs_of(moments)).weight.dequantize()
    assert torch.isfinite(found).all()
    assert inputs_of(torch.zeros_like(moments)) is None


def test_pairs_of_inputs_are_known_within_spans_of_whole_blocks() -> None:
    assert [span_of(size) for size in (32, 576, 896, 4864, 8960)] == [32, 576, 896, 608, 896]


def test_every_processor_finds_the_same_bits() -> None:
    code = (
        "import hashlib\n"
        "from tests.export.quantize.test_quantizers import *\n"
        "found = quantize('q4_1', make_weight()).weight.raw.numpy().tobytes()\n"
        "print(hashlib.sha256(found).hexdigest())"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"QUILL_KERNELS": kernels},
            check=True,
            capture_output=True,
        ).stdout
        for kernels in ("plain", "")
    }
    assert len(hashes) == 1


def test_eight_bits_err_by_half_a_step_at_most() -> None:
    weight = make_weight()
    found = eight_bits(weight)
    scale = torch.from_numpy(found.rows()[0].unpack().numbers_NSH).float()
    steps = (found.dequantize() - weight).abs().reshape(ROWS, -1, 32) / scale
    assert steps.max() <= 0.5001
    assert values_of(found).max() == 255


@pytest.mark.parametrize("size", [1e-3, 1e-5, 1e-6])
def test_eight_bits_of_tiny_weights_err_by_half_a_step_of_float16_at_most(size: float) -> None:
    weight = make_weight() * size
    found = eight_bits(weight).dequantize()
    step = (weight.abs().max() / 127).clamp_min(2.0**-24)
    assert (found - weight).abs().max() <= 0.51 * step


def test_eight_bits_of_zeros_are_zeros() -> None:
    assert eight_bits(torch.zeros(2, 32)).dequantize().abs().max() == 0


def test_the_number_of_cores_does_not_change_an_integer(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    weight_NI = torch.randn(700, 768, generator=generator)
    x_LI = torch.randn(900, 768, generator=generator).cumsum(1)
    moments_KCC = (x_LI.T @ x_LI / 900).unsqueeze(0)
    before, found = torch.get_num_threads(), []
    for num_cores in (1, 2, 3):
        monkeypatch.setattr("os.cpu_count", lambda num_cores=num_cores: num_cores)
        torch.set_num_threads(num_cores)
        found.append(quantize("q4_0", weight_NI, inputs_of(moments_KCC)).weight.raw)
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
