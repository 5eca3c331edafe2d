"""Finding integers for weights in full precision."""

import logging
import subprocess
import sys

import torch

from quill.export.quantize.quantizers import eight_bits, k_quant

ROWS, COLUMNS = 40, 128


def make_weight(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)) * 0.05


def test_four_bits_stay_near_the_weights() -> None:
    weight = make_weight()
    found = k_quant(weight.clone())
    assert found.shape == weight.shape
    error = (found.dequantize() - weight).square().mean().sqrt() / weight.std()
    # 16 levels over about four standard deviations leave an error of about a twelfth.
    assert 0.02 < error < 0.1


def test_four_bits_leave_the_weights_as_they_are() -> None:
    weight, before = make_weight(), make_weight()
    k_quant(weight)
    assert torch.equal(weight, before)


def test_weights_on_a_grid_of_sixteen_levels_are_found_again() -> None:
    steps = torch.arange(32).remainder(16).repeat(ROWS, COLUMNS // 32)
    weight = (steps - 8) * 0.25
    torch.testing.assert_close(k_quant(weight).dequantize(), weight, atol=1e-2, rtol=0)


def test_blocks_of_zeros_stay_zero() -> None:
    weight = make_weight()
    weight[:, :32] = 0
    found = k_quant(weight).dequantize()
    assert torch.isfinite(found).all()
    assert found[:, :32].abs().max() < 1e-6


def test_eight_bits_err_by_half_a_step_at_most() -> None:
    weight = make_weight()
    found = eight_bits(weight)
    steps = (found.dequantize() - weight).abs().reshape(ROWS, -1, 32) / found.scale_NG.unsqueeze(-1)
    assert steps.max() <= 0.5001
    assert found.q.abs().max() == 127


def test_eight_bits_of_zeros_are_zeros() -> None:
    assert eight_bits(torch.zeros(2, 32)).dequantize().abs().max() == 0


def test_loading_the_runtimes_quantizers_turns_on_nobodys_messages() -> None:
    code = (
        "import logging, quill.export.quantize.quantizers\n"
        "assert logging.root.handlers == [], logging.root.handlers\n"
        "assert logging.root.level == logging.WARNING\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert logging.root.level == logging.WARNING
