"""Positions: the worked example from the literature, and what rotation promises."""

import math

import pytest
import torch

from quill.model.network.config import RotaryScaling
from quill.model.network.positions import (
    RotaryTables,
    rotary_frequencies,
    rotate,
    sinusoidal_table,
)

# T tokens · F frequencies


def test_sinusoidal_positions_of_i_am_a_robot_for_d_4_and_n_100() -> None:
    table = sinusoidal_table(4, 4, base=100.0)
    expected = [
        [0.00, 1.00, 0.00, 1.00],  # I
        [0.84, 0.54, 0.10, 1.00],  # am
        [0.91, -0.42, 0.20, 0.98],  # a
        [0.14, -0.99, 0.30, 0.96],  # robot
    ]
    assert table.tolist() == [pytest.approx(row, abs=0.005) for row in expected]


def test_sinusoidal_positions_have_unit_pairs_and_depend_on_distance_only() -> None:
    table = sinusoidal_table(64, 32).to(torch.float64)
    norms = table.unflatten(1, (16, 2)).norm(dim=2)  # type: ignore[no-untyped-call]
    assert norms.flatten().tolist() == pytest.approx([1.0] * 64 * 16, abs=1e-6)
    products = table @ table.T
    assert products.diagonal(5).tolist() == pytest.approx([products[0, 5].item()] * 59, abs=1e-5)


def tables(num_positions: int, head_size: int) -> RotaryTables:
    frequency_F = rotary_frequencies(head_size, 10_000.0, None)
    angle_PF = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequency_F)
    return RotaryTables(angle_PF.cos(), angle_PF.sin())


def test_rotation_turns_each_pair_by_position_times_frequency() -> None:
    x = torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(1, 1, 3, 4)
    turned = rotate(x, tables(3, 4), 0)[0, 0]
    for position in range(3):
        fast, slow = position * 1.0, position * 0.01
        expected = [math.cos(fast), math.cos(slow), math.sin(fast), math.sin(slow)]
        assert turned[position].tolist() == pytest.approx(expected, abs=1e-6)


def test_rotated_queries_and_keys_meet_by_distance_only() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 16, generator=generator)
    rotary = tables(40, 16)

    def score(query_position: int, key_position: int) -> float:
        query = rotate(q.view(1, 1, 1, 16), rotary, query_position)
        key = rotate(k.view(1, 1, 1, 16), rotary, key_position)
        return (query * key).sum().item()

    assert score(7, 3) == pytest.approx(score(39, 35), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 5), abs=1e-2)


def test_linear_scaling_stretches_every_frequency() -> None:
    plain = rotary_frequencies(8, 10_000.0, None)
    scaled = rotary_frequencies(8, 10_000.0, RotaryScaling(kind="linear", factor=4.0))
    assert scaled.tolist() == pytest.approx((plain / 4).tolist())


def test_llama3_scaling_keeps_fast_frequencies_and_stretches_slow_ones() -> None:
    plain = rotary_frequencies(64, 500_000.0, None)
    scaling = RotaryScaling(kind="llama3", factor=8.0, original_context=8192)
    ratio = (rotary_frequencies(64, 500_000.0, scaling) / plain).tolist()
    assert ratio[0] == pytest.approx(1.0)
    assert ratio[-1] == pytest.approx(1 / 8)
    assert ratio == sorted(ratio, reverse=True)
    assert any(1 / 8 < r < 0.99 for r in ratio)
