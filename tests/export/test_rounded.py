"""Graphs whose weights and inputs are rounded to 8 bits."""

from pathlib import Path

import numpy as np
import pytest
import torch

from export.rounded import RoundedLinear, hadamard
from export.runner import Runner
from tests.export.tiny import LLAMA, SEQ2SEQ, Exported, export, make_checkpoint


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    out = tmp_path_factory.mktemp("bundles") / "rounded"
    return export(out, make_checkpoint(LLAMA), "fp32", "int8")


def test_each_output_has_a_scale_and_keeps_its_weights_within_half_a_step() -> None:
    weight_NI = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    weight_NI[3] *= 100
    layer = RoundedLinear(weight_NI)
    found_NI = layer.q_IN.T * layer.scale_N.unsqueeze(1)
    assert layer.q_IN.dtype == torch.int8
    assert ((found_NI - weight_NI).abs() <= layer.scale_N.unsqueeze(1) * 0.5001).all()


@pytest.mark.parametrize(("num_inputs", "size"), [(1536, 64), (96, 32), (35, 1)])
def test_mixing_twice_gives_back_what_was_mixed(num_inputs: int, size: int) -> None:
    mix_BB = hadamard(num_inputs)
    assert mix_BB.shape == (size, size)
    torch.testing.assert_close(mix_BB @ mix_BB, torch.eye(size))


def test_weights_of_nothing_stay_nothing() -> None:
    layer = RoundedLinear(torch.zeros(2, 32))
    assert not (layer.q_IN.T * layer.scale_N.unsqueeze(1)).any()


def test_its_perplexity_is_that_of_full_precision_almost(rounded: Exported) -> None:
    graphs = rounded.manifest.graphs_in("int8")
    assert graphs.verification is not None
    proof = graphs.verification
    assert proof.perplexity == pytest.approx(proof.reference_perplexity, rel=0.02)


def test_no_row_depends_on_its_company_even_alone(rounded: Exported) -> None:
    graphs = rounded.manifest.graphs_in("int8")
    assert graphs.invariance is not None
    assert graphs.invariance.holds
    assert graphs.invariance.min_rows == 1


def test_a_translator_can_be_rounded_too(tmp_path: Path) -> None:
    exported = export(tmp_path / "seq2seq", make_checkpoint(SEQ2SEQ), "int8")
    graphs = exported.manifest.graphs_in("int8")
    assert graphs.verification is not None
    proof = graphs.verification
    assert proof.perplexity == pytest.approx(proof.reference_perplexity, rel=0.05)
    assert graphs.invariance is not None
    assert graphs.invariance.min_rows == 1


def test_a_prompt_may_be_read_for_no_logits_at_all(rounded: Exported) -> None:
    manifest = rounded.manifest
    runner = Runner(rounded.directory, manifest.graphs_in("int8"), manifest.sizes, 2, 64)
    nothing_LV = runner.prefill(0, list(range(9)), [])
    assert nothing_LV.shape == (0, LLAMA.vocab_size)
    rest_LV = runner.prefill(0, list(range(9, 20)))
    whole_LV = runner.prefill(1, list(range(20)))
    assert np.array_equal(rest_LV, whole_LV)
