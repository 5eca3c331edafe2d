"""`quill train-speed`: both loops run on the same shape, and both of them learn."""

import pytest
import torch

from quill.__main__ import main
from quill.model.evaluation.nanogpt import NanoGPT, NanoLoop
from quill.model.evaluation.train_speed import CONTENDERS, make_contender


def test_the_plain_loop_learns() -> None:
    torch.manual_seed(0)
    ids = torch.arange(2000, dtype=torch.int32) * 7 % 64
    loop = NanoLoop(NanoGPT(64, 16, 64, 2, 4), ids, context=16, num_sequences=8)
    losses = [loop.run_step() for _ in range(60)]
    assert losses[-1] < losses[0] / 2


def test_the_contenders_are_of_one_size() -> None:
    sizes = [make_contender(name).num_parameters for name in CONTENDERS]
    assert max(sizes) / min(sizes) < 1.03


def test_the_comparison_prints_a_ratio_for_each(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train-speed", "--rounds", "1", "--steps", "1"]) == 0
    printed = capfd.readouterr().out
    assert "nanoGPT loop" in printed
    assert "1.000" in printed
