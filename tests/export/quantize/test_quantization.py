"""Which integers stand for which matrix."""

import torch

from quill.export.quantize.quantization import dequantized, quantize
from quill.export.quantize.quantizers import eight_bits
from quill.model.checkpoint.quantized_weight import QuantizedWeight
from tests.export.tiny import make_checkpoint, quantized_at_source
from tests.tiny_networks import GPT, LLAMA


def test_the_sources_own_integers_are_taken_as_they_are() -> None:
    checkpoint = quantized_at_source(make_checkpoint(LLAMA))
    found = quantize(checkpoint, 4)
    assert found.is_source
    assert found.description == "the source's own values (q4_1, q8_0)"
    assert found.weights == checkpoint.quantized


def test_what_the_source_kept_in_full_precision_is_quantized_here() -> None:
    checkpoint = quantized_at_source(make_checkpoint(LLAMA))
    name = "decoder.1.feed_forward.up.weight"
    del checkpoint.quantized[name]
    found = quantize(checkpoint, 4)
    assert not found.is_source
    assert found.description == "the source's own values, and k-quant for 1 matrices (q4_1, q8_0)"
    assert found.weights[name].kind == "q4_1"


def test_every_matrix_is_quantized_and_those_of_the_vocabulary_to_eight_bits() -> None:
    checkpoint = make_checkpoint(GPT)
    found = quantize(checkpoint, 4)
    matrices = {name for name, tensor in checkpoint.weights.items() if tensor.ndim == 2}
    assert set(found.weights) == matrices - {"position_embedding.weight"}
    kinds = {name: weight.kind for name, weight in found.weights.items()}
    assert kinds["embedding.weight"] == kinds["projection.weight"] == "q8_0"
    assert kinds["decoder.0.attention.qkv.weight"] == "q4_1"


def test_a_four_bit_embedding_becomes_eight_bits_without_loss() -> None:
    checkpoint = quantized_at_source(make_checkpoint(LLAMA))
    before = checkpoint.quantized["embedding.weight"]
    q = torch.randint(0, 256, (LLAMA.vocab_size, LLAMA.d_model // 2)).to(torch.uint8)
    four_bits = QuantizedWeight("q4_0", q, before.scale_NG)
    checkpoint.quantized["embedding.weight"] = four_bits
    found = quantize(checkpoint, 4).weights["embedding.weight"]
    assert found.kind == "q8_0"
    assert torch.equal(found.dequantize(), four_bits.dequantize())


def test_the_dequantized_checkpoint_has_the_values_of_the_integers() -> None:
    checkpoint = make_checkpoint(LLAMA)
    quantization = quantize(checkpoint, 4)
    values = dequantized(checkpoint, quantization).weights
    name = "decoder.0.attention.out.weight"
    assert torch.equal(values[name], quantization.weights[name].dequantize())
    assert not torch.equal(values[name], checkpoint.weights[name])
    norm = "decoder_norm.weight"
    assert torch.equal(values[norm], checkpoint.weights[norm])


def test_at_eight_bits_the_sources_values_are_kept() -> None:
    checkpoint = quantized_at_source(make_checkpoint(LLAMA))
    name = "decoder.0.attention.out.weight"
    with_minima = checkpoint.quantized[name]
    checkpoint.quantized[name] = QuantizedWeight("q4_0", with_minima.q, with_minima.scale_NG)
    found = quantize(checkpoint, 8)
    assert found.weights["embedding.weight"] is checkpoint.quantized["embedding.weight"]
    for name, source in checkpoint.quantized.items():
        assert torch.equal(found.weights[name].dequantize(), source.dequantize()), name
    assert found.is_source
    assert found.description == "the source's own values (q8_0, q8_1)"


def test_at_eight_bits_scales_beside_minima_that_16_bits_cannot_hold_are_found_anew() -> None:
    checkpoint = quantized_at_source(make_checkpoint(LLAMA))
    name = "decoder.0.attention.out.weight"
    source = checkpoint.quantized[name]
    odd = QuantizedWeight("q4_1", source.q, source.scale_NG * 1.0001, source.minimum_NG)
    checkpoint.quantized[name] = odd
    found = quantize(checkpoint, 8)
    assert found.weights[name].kind == "q8_0"
    assert not found.is_source


def test_at_eight_bits_weights_in_full_precision_are_rounded() -> None:
    checkpoint = make_checkpoint(GPT)
    found = quantize(checkpoint, 8)
    assert found.description == "rounded to 8 bits (q8_0)"
    for name, weight in found.weights.items():
        expected = eight_bits(checkpoint.weights[name])
        assert torch.equal(weight.dequantize(), expected.dequantize()), name
