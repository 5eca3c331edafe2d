"""How much each matrix matters, by PyTorch run forwards and backwards."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quill.export.pipeline import quietly
from quill.export.quantize.matrices import QuantizedMatrices, Recipe
from quill.export.quantize.mixture import MAX_BITS, options
from quill.export.quantize.quantization import Quantization
from quill.export.quantize.quantizers import FoundKind
from quill.export.verify.calibration import Calibration, LossMeter
from quill.export.verify.held_out import NUM_CALIBRATION, calibration_text, held_out
from quill.export.verify.recipe import can_calibrate, find_recipe
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.checkpoint.tensors import TensorFile
from quill.model.data.tokenizer import byte_tokenizer
from quill.model.network.config import ModelConfig
from tests.export.tiny import make_checkpoint, quantized_at_source
from tests.tiny_networks import GPT, LLAMA, SEQ2SEQ


def calibrated(checkpoint: Checkpoint, tmp_path: Path) -> Recipe:
    text = calibration_text(checkpoint, None)
    assert text is not None
    file = TensorFile(tmp_path / "statistics", os.O_RDWR | os.O_CREAT)
    return Recipe({}, Calibration(checkpoint, file).statistics(text.passages, lambda: None), {})


def quantized(
    checkpoint: Checkpoint, recipe: Recipe, kinds: dict[str, FoundKind], tmp_path: Path
) -> Quantization:
    """Only some matrices: the others keep their values."""
    matrices = QuantizedMatrices(checkpoint, 4, tmp_path, recipe=recipe._replace(kinds=kinds))
    weights = {name: matrices[name] for name in kinds}
    return Quantization(weights, "", is_source=False)


@pytest.mark.parametrize(
    "name",
    ["embedding.weight", "decoder.0.attention.qkv.weight", "decoder.1.feed_forward.down.weight"],
)
@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
def test_a_predicted_loss_is_about_what_is_measured(
    config: ModelConfig, name: str, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(config)
    recipe = calibrated(checkpoint, tmp_path)
    meter = LossMeter(checkpoint, held_out(checkpoint, None).passages)
    tried = options(name, checkpoint.weights[name], recipe.statistics[name])
    predicted = {option.kind: option.loss for option in tried}
    assert predicted["q4_0"] > 3 * predicted["q5_0"] > 15 * predicted["q8_0"]
    found = meter.loss(quantized(checkpoint, recipe, {name: "q5_0"}, tmp_path))
    assert 0.4 < found / predicted["q5_0"] < 2.5


def test_every_matrix_has_statistics(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(GPT)
    found = calibrated(checkpoint, tmp_path).statistics
    assert set(found) == set(QuantizedMatrices(checkpoint, 4, tmp_path))
    for name in found:
        outputs_N, moments_KCC = found[name]
        assert len(outputs_N) == len(checkpoint.weights[name])
        assert moments_KCC.shape == (1, *[checkpoint.weights[name].shape[1]] * 2)
        assert torch.allclose(moments_KCC, moments_KCC.mT, rtol=1e-3)


def test_a_recipe_names_a_kind_for_each_matrix_of_full_precision(tmp_path: Path) -> None:
    whole = make_checkpoint(LLAMA)
    name = "decoder.0.attention.out.weight"
    kept = quantized_at_source(whole).quantized
    partly = replace(whole, quantized={each: kept[each] for each in kept if each != name})
    found = find_recipe(partly, tmp_path, None, quietly)
    assert found is not None
    assert set(found.kinds) == {name}
    found = find_recipe(whole, tmp_path, None, quietly)
    assert found is not None
    matrices = QuantizedMatrices(whole, 4, tmp_path, recipe=found)
    assert {name: matrices[name].weight.kind for name in matrices} == found.kinds
    sizes = [(8 * each.weight.raw.numel(), each.weight.shape) for each in matrices.values()]
    assert sum(bits for bits, _ in sizes) <= MAX_BITS * sum(n * i for _, (n, i) in sizes)
    said = matrices.quantization().description
    assert said.startswith("mixed by sensitivity (")
    assert "feed_forward.down 0" in said


def test_only_weights_of_full_precision_of_causal_transformers_are_calibrated() -> None:
    checkpoint = make_checkpoint(LLAMA)
    assert can_calibrate(checkpoint)
    assert not can_calibrate(quantized_at_source(checkpoint))
    assert not can_calibrate(make_checkpoint(SEQ2SEQ))


def test_no_passage_is_both_calibrated_on_and_held_out(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(map(str, range(3000))), encoding="utf-8")
    checkpoint = replace(make_checkpoint(LLAMA), tokenizer=byte_tokenizer())
    for given, model in ((text, checkpoint), (None, make_checkpoint(LLAMA))):
        used = calibration_text(model, given)
        assert used is not None
        assert len(used.passages) >= NUM_CALIBRATION
        assert not {each.ids for each in used.passages} & {
            each.ids for each in held_out(model, given).passages
        }
