"""Which integers stand for which matrix."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from quill.export.errors import UnsupportedModelError
from quill.export.operators.library import library_path
from quill.export.quantize import matrices
from quill.export.quantize.matrices import QuantizedMatrices
from quill.export.quantize.quantization import Quantization, dequantized, is_quantized
from quill.export.quantize.quantizers import eight_bits
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.checkpoint.quantized_weight import QuantizedWeight
from tests.export.tiny import make_checkpoint, quantized_at_source
from tests.random_weights import random_weight
from tests.tiny_networks import GPT, LLAMA


def quantize(checkpoint: Checkpoint, bits: Literal[4, 8], parts: Path) -> Quantization:
    found = QuantizedMatrices(checkpoint, bits, parts)
    for name in found:
        assert found[name].weight.shape == checkpoint.weights[name].shape
    return found.quantization()


def with_weight(checkpoint: Checkpoint, name: str, weight: QuantizedWeight) -> Checkpoint:
    return replace(checkpoint, quantized={**checkpoint.quantized, name: weight})


def test_the_sources_own_integers_are_taken_as_they_are(tmp_path: Path) -> None:
    checkpoint = quantized_at_source(make_checkpoint(LLAMA))
    found = quantize(checkpoint, 4, tmp_path)
    assert found.is_source
    assert re.fullmatch(
        r"the source's own values \(q4_1, q8_0; \d\.\d\d bits a weight\)", found.description
    )
    assert {name: each.weight for name, each in found.weights.items()} == checkpoint.quantized
    assert {each.input_bits for each in found.weights.values()} == {8}


def test_what_the_source_kept_in_full_precision_is_quantized_here(tmp_path: Path) -> None:
    floats = make_checkpoint(LLAMA)
    checkpoint = quantized_at_source(floats)
    name = "decoder.1.feed_forward.up.weight"
    kept = {each: weight for each, weight in checkpoint.quantized.items() if each != name}
    weights = {**checkpoint.weights, name: floats.weights[name]}
    found = quantize(replace(checkpoint, weights=weights, quantized=kept), 4, tmp_path)
    assert not found.is_source
    said = (
        r"the source's own values, and rounded for 1 matrices \(q4_1, q8_0; \d\.\d\d bits a weight"
        r"; relative squared error 0\.00\d+\)"
    )
    assert re.fullmatch(said, found.description)
    assert found.weights[name].weight.kind == "q4_1"


def test_every_matrix_is_quantized_and_those_of_the_vocabulary_to_eight_bits(
    tmp_path: Path,
) -> None:
    checkpoint = make_checkpoint(GPT)
    found = quantize(checkpoint, 4, tmp_path)
    all_names = {name for name, tensor in checkpoint.weights.items() if tensor.ndim == 2}
    assert set(found.weights) == all_names - {"position_embedding.weight"}
    kinds = {name: each.weight.kind for name, each in found.weights.items()}
    assert kinds["embedding.weight"] == kinds["projection.weight"] == "q8_0"
    assert kinds["decoder.0.attention.qkv.weight"] == "q4_1"


def test_the_gate_of_shared_experts_keeps_its_floats() -> None:
    assert not is_quantized("decoder.0.feed_forward.shared.gate_1D", 2)


def test_the_parts_of_a_killed_export_belong_to_the_kernels_that_made_them() -> None:
    assert library_path().name in matrices._CODE


def test_a_four_bit_embedding_keeps_its_values(tmp_path: Path) -> None:
    checkpoint = quantized_at_source(make_checkpoint(LLAMA))
    four_bits = random_weight("q4_0", LLAMA.vocab_size, LLAMA.d_model)
    checkpoint = with_weight(checkpoint, "embedding.weight", four_bits)
    assert quantize(checkpoint, 4, tmp_path).weights["embedding.weight"].weight is four_bits


def test_the_dequantized_checkpoint_has_the_values_of_the_integers(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(LLAMA)
    quantization = quantize(checkpoint, 4, tmp_path)
    values = dequantized(checkpoint, quantization).weights
    name = "decoder.0.attention.out.weight"
    assert torch.equal(values[name], quantization.weights[name].weight.dequantize())
    assert not torch.equal(values[name], checkpoint.weights[name])
    norm = "decoder_norm.weight"
    assert torch.equal(values[norm], checkpoint.weights[norm])


def test_at_eight_bits_the_sources_values_are_kept(tmp_path: Path) -> None:
    checkpoint = quantized_at_source(make_checkpoint(LLAMA))
    name = "decoder.0.attention.out.weight"
    four_bits = random_weight("q4_0", LLAMA.d_model, LLAMA.d_model)
    checkpoint = with_weight(checkpoint, name, four_bits)
    found = quantize(checkpoint, 8, tmp_path)
    for name, source in checkpoint.quantized.items():
        assert found.weights[name].weight is source, name
        assert found.weights[name].input_bits == 16
    assert found.is_source
    assert found.description.startswith("the source's own values (q4_0, q4_1, q8_0; ")


def test_at_eight_bits_weights_in_full_precision_are_rounded(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(GPT)
    found = quantize(checkpoint, 8, tmp_path)
    said = r"rounded \(q8_0; 8\.50 bits a weight; relative squared error \d(\.\d)?e-05\)"
    assert re.fullmatch(said, found.description)
    for name, each in found.weights.items():
        expected = eight_bits(checkpoint.weights[name])
        assert torch.equal(each.weight.dequantize(), expected.dequantize()), name


@pytest.mark.parametrize("bad", [1e6, float("nan")])
def test_weights_that_float16_scales_cannot_reach_are_refused_by_name(
    bad: float, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(GPT)
    dict(checkpoint.weights)["decoder.0.attention.qkv.weight"][3, 4] = bad
    with pytest.raises(UnsupportedModelError, match=r"decoder\.0\.attention\.qkv\.weight"):
        quantize(checkpoint, 4, tmp_path)


def test_matrices_that_a_killed_export_quantized_are_found_again(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(GPT)
    first = quantize(checkpoint, 4, tmp_path)
    raws = {name: each.weight.raw for name, each in first.weights.items()}
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    damaged = min(times)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    again = quantize(checkpoint, 4, tmp_path)
    assert again.description == first.description
    assert all(torch.equal(again.weights[name].weight.raw, raw) for name, raw in raws.items())
    new = {path for path in tmp_path.iterdir() if times.get(path) != path.stat().st_mtime_ns}
    assert new == {damaged}, "the damaged one is made again, the others aren't"
