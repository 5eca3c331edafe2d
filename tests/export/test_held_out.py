"""Where the text to compare on comes from."""

import dataclasses
from pathlib import Path

import pytest

from export.errors import ExportError
from export.held_out import NUM_PASSAGES, held_out
from model.errors import CorpusError
from model.material import DataSource
from model.recipes import RECIPES
from model.splits import Pair, PairCorpus
from model.tokenizer import SEQ2SEQ_SPECIAL_TOKENS, SpecialTokens, byte_tokenizer
from model.train import Order
from tests.export.tiny import LLAMA, SEQ2SEQ, make_checkpoint, quantised_at_source


def test_the_users_text_is_cut_into_passages_of_the_context(text: Path) -> None:
    found = held_out(quantised_at_source(make_checkpoint(LLAMA)), text)
    assert found.name == str(text)
    assert 0 < len(found.passages) <= NUM_PASSAGES
    assert {len(passage.ids) for passage in found.passages} == {LLAMA.context}


def test_a_passage_begins_with_bos_if_the_models_texts_do(text: Path) -> None:
    checkpoint = quantised_at_source(make_checkpoint(LLAMA))
    found = held_out(dataclasses.replace(checkpoint, prepend_bos=True), text)
    assert {passage.ids[0] for passage in found.passages} == {0}
    assert {len(passage.ids) for passage in found.passages} == {LLAMA.context}


def test_a_text_shorter_than_a_passage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("Too short.", encoding="utf-8")
    with pytest.raises(ExportError, match="fewer than 96 tokens"):
        held_out(quantised_at_source(make_checkpoint(LLAMA)), path)


def test_a_text_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="can't read the text"):
        held_out(quantised_at_source(make_checkpoint(LLAMA)), tmp_path / "nowhere.txt")


def test_a_model_without_a_tokenizer_writes_its_own_text() -> None:
    checkpoint = make_checkpoint(LLAMA)
    found = held_out(checkpoint, None)
    assert found.name == "drawn from the model"
    assert found == held_out(checkpoint, None)
    assert len({passage.ids for passage in found.passages}) == NUM_PASSAGES


def test_a_text_for_a_model_without_a_tokenizer_is_refused(text: Path) -> None:
    with pytest.raises(ExportError, match="needs a tokenizer"):
        held_out(make_checkpoint(LLAMA), text)


def test_without_network_or_cache_the_model_writes_its_own_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def offline(name: str) -> None:
        raise CorpusError("no network")

    monkeypatch.setattr("export.held_out.load_text", offline)
    checkpoint = quantised_at_source(make_checkpoint(LLAMA))
    assert held_out(checkpoint, None).name == "drawn from the model"


def test_pairs_are_marked_as_in_training(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(SEQ2SEQ_SPECIAL_TOKENS)
    checkpoint = dataclasses.replace(
        make_checkpoint(SEQ2SEQ),
        tokenizer=tokenizer,
        special_tokens=SpecialTokens(bos=1, eos=2, pad=0),
    )
    path = tmp_path / "pairs.tsv"
    lines = [f"source {i}\ttarget {i}" for i in range(50)]
    path.write_text("\n".join(lines), encoding="utf-8")
    passage = held_out(checkpoint, path).passages[0]
    assert passage.ids[0] == 1
    assert passage.ids[-1] == passage.source[-1] == 2
    assert tokenizer.decode(passage.source[:-1]).startswith("source ")


def test_a_trained_model_is_measured_on_what_it_was_not_trained_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = [Pair(f"source {i}", f"target {i}") for i in range(3)]
    monkeypatch.setattr("export.held_out.load_pairs", lambda name: PairCorpus(name, [], pairs, []))
    order = Order(SEQ2SEQ, RECIPES["seq2seq-tiny"], DataSource(corpus="en-de"))
    checkpoint = dataclasses.replace(
        make_checkpoint(SEQ2SEQ),
        tokenizer=byte_tokenizer(SEQ2SEQ_SPECIAL_TOKENS),
        special_tokens=SpecialTokens(bos=1, eos=2, pad=0),
        provenance=order.provenance(),
    )
    found = held_out(checkpoint, None)
    assert found.name == "en-de, held out"
    assert len(found.passages) == 3


def test_a_seq2seq_model_without_pairs_answers_random_sources() -> None:
    found = held_out(make_checkpoint(SEQ2SEQ), None)
    assert found.name == "drawn from the model"
    assert all(passage.source for passage in found.passages)
