"""Encoder–decoders of Hugging Face's become checkpoints that compute the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quill.model.data.tokenizer import byte_tokenizer
from quill.model.errors import UnsupportedError
from quill.model.importers.huggingface_directory import read_huggingface
from quill.model.reference.generate import generate
from quill.model.reference.sampling import SamplingParameters
from tests.model.data.test_sentencepiece import write
from tests.model.huggingface_models import CONTEXT, EOS, PAD, change_config, marian, saved
from tests.model.seq2seqs import SEQ2SEQS, START, bart, source_ids

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


@pytest.mark.parametrize("name", SEQ2SEQS)
def test_logits_of_t5_and_bart_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    theirs = SEQ2SEQS[name]()
    checkpoint = read_huggingface(saved(theirs, tmp_path))
    assert checkpoint.config.tied_embeddings == ("of its own" not in name)
    ours = checkpoint.build()
    source = torch.tensor([source_ids(90, 1), source_ids(90, 2)])
    mask = torch.ones_like(source, dtype=torch.bool)
    mask[1, 50:] = False
    target = torch.tensor([[START, *source_ids(89, 3)], [START, *source_ids(89, 4)]])
    with torch.inference_mode():
        expected = theirs(source, attention_mask=mask.long(), decoder_input_ids=target).logits
        found = ours(target, ours.encode(source, mask))
    assert expected.std() > 0.1
    assert (found - expected).abs().max() < TOLERANCE * expected.std(), "float32 rounds relatively"


def test_special_tokens_and_greedy_default_come_along(tmp_path: Path) -> None:
    checkpoint = read_huggingface(saved(marian(), tmp_path))
    assert checkpoint.special_tokens.bos == PAD
    assert checkpoint.stop_ids == (EOS,)
    assert checkpoint.generation["temperature"] == 0.0, "a translation is greedy by default"


def test_a_directory_without_tokenizer_json_has_the_tokenizer_of_its_two_files(
    tmp_path: Path,
) -> None:
    write(saved(marian(), tmp_path))
    checkpoint = read_huggingface(tmp_path)
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.encode("ab") == [2, 3]
    assert (checkpoint.special_tokens.eos, checkpoint.special_tokens.bos) == (EOS, PAD)


@pytest.mark.parametrize(("kind", "source_bos"), [("RobertaProcessing", 2), ("none", None)])
def test_a_source_begins_as_the_tokenizer_has_it(
    tmp_path: Path, kind: str, source_bos: int | None
) -> None:
    saved(bart(decoder_start_token_id=EOS), tmp_path)
    inner = byte_tokenizer(("<pad>", "</s>", "<s>"))
    inner.save(tmp_path / "tokenizer.json")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    if source_bos is not None:
        content["post_processor"] = {"type": kind, "sep": ["</s>", 1], "cls": ["<s>", 2]}
        content["post_processor"] |= {"trim_offsets": True, "add_prefix_space": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    special = read_huggingface(tmp_path).special_tokens
    assert (special.bos, special.eos, special.source_bos) == (EOS, 1, source_bos)


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
