"""A Marian model of Hugging Face's becomes a checkpoint that computes the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quill.model.errors import UnsupportedError
from quill.model.importers.huggingface_directory import read_huggingface
from quill.model.reference.generate import generate
from quill.model.reference.sampling import SamplingParameters
from tests.model.huggingface_models import CONTEXT, EOS, PAD, change_config, marian, saved

TOLERANCE = 1e-4


def ids(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [*torch.randint(1, PAD, (length - 1,), generator=generator).tolist(), EOS]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation_function": "relu"},
        {"activation_function": "gelu", "scale_embedding": False},
    ],
    ids=["swish", "relu", "gelu"],
)
def test_logits_are_those_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = marian(**changes)
    ours = read_huggingface(saved(theirs, tmp_path)).build()
    source, target = torch.tensor([ids(40, 1)]), torch.tensor([[PAD, *ids(CONTEXT - 1, 2)]])
    with torch.inference_mode():
        expected = theirs(source, decoder_input_ids=target).logits
        found = ours(target, ours.encode(source, torch.ones_like(source, dtype=torch.bool)))
    assert expected.std() > 0.5
    assert (found - expected).abs().max() < TOLERANCE


def test_special_tokens_and_greedy_default_come_along(tmp_path: Path) -> None:
    checkpoint = read_huggingface(saved(marian(), tmp_path))
    assert checkpoint.special_tokens.bos == PAD
    assert checkpoint.stop_ids == (EOS,)
    assert checkpoint.generation["temperature"] == 0.0, "a translation is greedy by default"


def ban(directory: Path, *words: list[int]) -> None:
    path = directory / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bad_words_ids": words}))


def test_token_that_the_author_bans_is_never_said(tmp_path: Path) -> None:
    theirs = marian()
    free = read_huggingface(saved(theirs, tmp_path))
    source = ids(9, 4)
    greedy = SamplingParameters(temperature=0.0, max_new_tokens=8)
    said = generate(free.build(), [PAD], greedy, source_ids=source).token_ids
    ban(tmp_path, [said[0]])
    banned = read_huggingface(tmp_path)
    assert said[0] not in generate(banned.build(), [PAD], greedy, source_ids=source).token_ids


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"encoder_ffn_dim": 40}, "encoder_ffn_dim is 40 and its decoder_ffn_dim is 80"),
        ({"normalize_before": True}, "normalize_before True"),
        ({"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings False"),
        ({"activation_function": "tanh"}, "activation_function is 'tanh'"),
    ],
)
def test_other_shapes_are_refused_in_words(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    change_config(saved(marian(), tmp_path), **change)
    with pytest.raises(UnsupportedError, match=words):
        read_huggingface(tmp_path)


def test_longer_banned_words_are_refused(tmp_path: Path) -> None:
    ban(saved(marian(), tmp_path), [3, 4])
    with pytest.raises(UnsupportedError, match="single tokens only"):
        read_huggingface(tmp_path)
