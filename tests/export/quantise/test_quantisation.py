"""Which integers stand for which matrix."""

import dataclasses

import pytest
import torch

from quill.export.errors import UnsupportedModelError
from quill.export.quantise.quantisation import check_quantisable, dequantised, quantise
from quill.model.checkpoint.quantised_weight import QuantisedWeight
from tests.export.tiny import GPT, LLAMA, make_checkpoint, quantised_at_source


def test_the_sources_own_integers_are_taken_as_they_are() -> None:
    checkpoint = quantised_at_source(make_checkpoint(LLAMA))
    found = quantise(checkpoint, 4)
    assert found.is_source
    assert found.description == "the source's own values (q4_1, q8_0)"
    assert found.weights == checkpoint.quantised


def test_what_the_source_kept_in_full_precision_is_quantised_here() -> None:
    checkpoint = quantised_at_source(make_checkpoint(LLAMA))
    name = "decoder.1.feed_forward.up.weight"
    del checkpoint.quantised[name]
    found = quantise(checkpoint, 4)
    assert not found.is_source
    assert found.description == "the source's own values, and k-quant for 1 matrices (q4_1, q8_0)"
    assert found.weights[name].kind == "q4_1"


def test_every_matrix_is_quantised_and_those_of_the_vocabulary_to_eight_bits() -> None:
    checkpoint = make_checkpoint(GPT)
    found = quantise(checkpoint, 4)
    matrices = {name for name, tensor in checkpoint.weights.items() if tensor.ndim == 2}
    assert set(found.weights) == matrices - {"position_embedding.weight"}
    kinds = {name: weight.kind for name, weight in found.weights.items()}
    assert kinds["embedding.weight"] == kinds["projection.weight"] == "q8_0"
    assert kinds["decoder.0.attention.qkv.weight"] == "q4_1"


def test_a_four_bit_embedding_becomes_eight_bits_without_loss() -> None:
    checkpoint = quantised_at_source(make_checkpoint(LLAMA))
    before = checkpoint.quantised["embedding.weight"]
    q = torch.randint(0, 256, (LLAMA.vocab_size, LLAMA.d_model // 2)).to(torch.uint8)
    four_bits = QuantisedWeight("q4_0", q, before.scale_NG)
    checkpoint.quantised["embedding.weight"] = four_bits
    found = quantise(checkpoint, 4).weights["embedding.weight"]
    assert found.kind == "q8_0"
    assert torch.equal(found.dequantise(), four_bits.dequantise())


def test_the_dequantised_checkpoint_has_the_values_of_the_integers() -> None:
    checkpoint = make_checkpoint(LLAMA)
    quantisation = quantise(checkpoint, 4)
    values = dequantised(checkpoint, quantisation).weights
    name = "decoder.0.attention.out.weight"
    assert torch.equal(values[name], quantisation.weights[name].dequantise())
    assert not torch.equal(values[name], checkpoint.weights[name])
    norm = "decoder_norm.weight"
    assert torch.equal(values[norm], checkpoint.weights[norm])


def test_widths_that_blocks_of_32_do_not_fit_are_refused_by_name() -> None:
    config = dataclasses.replace(LLAMA, d_ff=100)
    with pytest.raises(
        UnsupportedModelError, match=r"d_ff is 100; weights in integers need multiples"
    ):
        check_quantisable(config)


def test_at_eight_bits_the_sources_values_are_kept() -> None:
    checkpoint = quantised_at_source(make_checkpoint(LLAMA))
    name = "decoder.0.attention.out.weight"
    with_minima = checkpoint.quantised[name]
    checkpoint.quantised[name] = QuantisedWeight("q4_0", with_minima.q, with_minima.scale_NG)
    found = quantise(checkpoint, 8)
    assert found.weights["embedding.weight"] is checkpoint.quantised["embedding.weight"]
    for name, source in checkpoint.quantised.items():
        assert torch.equal(found.weights[name].dequantise(), source.dequantise()), name
    assert found.is_source
    assert found.description == "the source's own values (q8_0, q8_1)"


def test_at_eight_bits_scales_beside_minima_that_16_bits_cannot_hold_are_found_anew() -> None:
    checkpoint = quantised_at_source(make_checkpoint(LLAMA))
    name = "decoder.0.attention.out.weight"
    source = checkpoint.quantised[name]
    odd = QuantisedWeight("q4_1", source.q, source.scale_NG * 1.0001, source.minimum_NG)
    checkpoint.quantised[name] = odd
    found = quantise(checkpoint, 8)
    assert found.weights[name].kind == "q8_0"
    assert not found.is_source


def test_at_eight_bits_weights_move_by_half_a_step_at_most() -> None:
    checkpoint = make_checkpoint(GPT)
    found = quantise(checkpoint, 8)
    assert found.description == "rounded to 8 bits (q8_0)"
    for name, weight in found.weights.items():
        moved_NI = (weight.dequantise() - checkpoint.weights[name]).abs()
        step_NI = weight.scale_NG.repeat_interleave(32, dim=1)
        assert (moved_NI <= 0.5001 * step_NI).all(), name
