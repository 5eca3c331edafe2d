"""`quill attention`: the weights are the network's own, and bad requests are refused."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib import image

from quill.__main__ import main
from quill.model.checkpoint.checkpoint import Checkpoint, save_checkpoint
from quill.model.data.tokenizer import SEQ2SEQ_SPECIAL_TOKENS, byte_tokenizer
from quill.model.errors import CheckpointError, RequestError
from quill.model.evaluation.attention_maps import (
    RecordingAttention,
    choose_indices,
    find_looks,
    record,
)
from quill.model.network.config import ModelConfig
from quill.model.network.transformer import Transformer
from tests.tiny_networks import randomized, tiny

CAUSAL = tiny(259, 24, num_layers=3)
SEQ2SEQ = dataclasses.replace(
    CAUSAL, family="seq2seq", num_encoder_layers=1, positions="sinusoidal"
)


def make_checkpoint(config: ModelConfig) -> Checkpoint:
    tokenizer = byte_tokenizer(SEQ2SEQ_SPECIAL_TOKENS)
    return Checkpoint(config, randomized(config).state_dict(), tokenizer, tokenizer.special)


@torch.no_grad()
def test_recording_attends_as_the_network_does() -> None:
    ids = torch.tensor([[5, 3, 8, 8, 1]])
    for config in (CAUSAL, SEQ2SEQ):
        model = make_checkpoint(config).build()
        assert isinstance(model, Transformer)
        source, mask = torch.tensor([[9, 7, 6]]), torch.ones(1, 3, dtype=torch.bool)
        cross = model.encode(source, mask) if config.family == "seq2seq" else None
        recording = RecordingAttention(config, model.rotary, cross)
        hidden = model.hidden(ids, recording)
        assert torch.allclose(hidden, model.hidden(ids, model.uncached(cross)), atol=1e-4)
        assert len(recording.self_weights) == config.num_layers
        assert len(recording.cross_weights) == (0 if cross is None else config.num_layers)


def test_each_token_of_a_causal_model_looks_at_itself_and_its_past() -> None:
    looks = find_looks(make_checkpoint(CAUSAL), "abcd", None)
    for weights in record(looks):
        assert weights.shape == (4, 4, 4)
        future = np.triu(np.ones((4, 4), dtype=bool), 1)
        assert np.isnan(weights[:, future]).all()
        assert np.nansum(weights, axis=2) == pytest.approx(np.ones((4, 4)), abs=1e-6)


def test_a_text_begins_with_bos_where_the_model_was_trained_so() -> None:
    checkpoint = dataclasses.replace(make_checkpoint(CAUSAL), prepend_bos=True)
    assert find_looks(checkpoint, "a", None).rows == [checkpoint.special_tokens.bos, ord("a") + 3]


def test_each_token_of_a_translation_looks_at_the_whole_source() -> None:
    checkpoint = make_checkpoint(SEQ2SEQ)
    looks = find_looks(checkpoint, "abcd", "xy")
    bos, eos = checkpoint.special_tokens.bos, checkpoint.special_tokens.eos
    x, y = ord("x") + 3, ord("y") + 3
    assert looks.rows == [x, y, eos]
    assert looks.input_ids == [bos, x, y]
    assert len(looks.columns) == 5
    for weights in record(looks):
        assert weights.shape == (4, 3, 5)
        assert weights.sum(axis=2) == pytest.approx(np.ones((4, 3)), abs=1e-6)


def test_without_a_target_the_model_translates() -> None:
    looks = find_looks(make_checkpoint(SEQ2SEQ), "abcd", None)
    assert 1 <= len(looks.rows) < SEQ2SEQ.context
    assert looks.input_ids[1:] == looks.rows[:-1]


@pytest.mark.parametrize(
    ("asked", "number", "expected"),
    [
        ("all", 3, [0, 1, 2]),
        ("2,0", 3, [2, 0]),
        (None, 1, [0]),
        (None, 3, [0, 1, 2]),
        (None, 30, [0, 9, 19, 29]),
    ],
)
def test_layers_and_heads_are_chosen(asked: str | None, number: int, expected: list[int]) -> None:
    assert choose_indices("layer", asked, number) == expected


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("3", "there is no head 3; the model has heads 0 to 2"),
        ("-1", "there is no head -1"),
        ("0,x", "heads are '0,x'; write numbers with commas"),
        ("", "heads are ''"),
    ],
)
def test_layers_and_heads_out_of_range_are_refused_by_name(asked: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        choose_indices("head", asked, 3)


@pytest.mark.parametrize(
    ("config", "text", "target", "message"),
    [
        (CAUSAL, "x" * 25, None, "the text has 25 tokens; the model takes from 1 to 24"),
        (CAUSAL, "", None, "the text has 0 tokens"),
        (CAUSAL, "x", "y", "only a seq2seq model has a source and a target"),
        (SEQ2SEQ, "x" * 24, None, "the text has 25 tokens"),
        (SEQ2SEQ, "x", "y" * 24, "the target has 25 tokens"),
    ],
)
def test_texts_that_do_not_fit_are_refused(
    config: ModelConfig, text: str, target: str | None, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        find_looks(make_checkpoint(config), text, target)


def test_a_checkpoint_without_a_tokenizer_is_refused() -> None:
    checkpoint = dataclasses.replace(make_checkpoint(CAUSAL), tokenizer=None)
    with pytest.raises(CheckpointError, match="the checkpoint has no tokenizer"):
        find_looks(checkpoint, "x", None)


def test_the_command_draws_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(tmp_path / "checkpoint", make_checkpoint(CAUSAL))
    out = tmp_path / "new" / "a.png"
    arguments = ["--checkpoint", str(tmp_path / "checkpoint"), "--heads", "0,3", "--out", str(out)]
    assert main(["attention", "it is 🙂 $", *arguments]) == 0
    assert capsys.readouterr().out == f"{out}: 6 maps of 12 x 12 tokens\n"
    height, width = image.imread(out).shape[:2]
    assert width > 500
    assert height > 1000
    assert list(out.parent.iterdir()) == [out]
