"""BERT and a sentence-embedding directory become checkpoints that compute the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertForMaskedLM, BertForPreTraining, BertModel

from quill.model.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from quill.model.errors import CheckpointError, UnsupportedError
from quill.model.importers.huggingface_directory import read_huggingface
from quill.model.importers.import_weights import find_source
from quill.model.network.attention import EncoderAttention
from quill.model.network.transformer import Transformer
from tests.model.huggingface_models import bert, saved

TOLERANCE = 1e-4
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "union", "state", "of", "##s"]


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two rows, the second of them shorter, with two segments."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(300, (2, 40), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 23:] = 0
    return ids, mask, (torch.arange(40) > 11).long().expand(2, -1)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (BertForMaskedLM, {}),
        (BertForPreTraining, {"hidden_act": "relu"}),
        (BertForMaskedLM, {"hidden_act": "gelu_new", "type_vocab_size": 3}),
    ],
    ids=["masked", "pretraining", "gelu_new"],
)
def test_logits_are_those_of_transformers(
    tmp_path: Path, kind: Any, changes: dict[str, Any]
) -> None:
    theirs = bert(kind, **changes)
    ours = read_huggingface(saved(theirs, tmp_path)).build()
    assert isinstance(ours, Transformer)
    ids, mask, segments = batch()
    with torch.inference_mode():
        out = theirs(ids, attention_mask=mask, token_type_ids=segments)
        expected = out.logits if kind is BertForMaskedLM else out.prediction_logits
        attn_impl = EncoderAttention(ours.config, None, mask.bool())
        found = ours.project(ours.memory(ids, attn_impl, segments))
    real = mask.bool()
    assert expected.std() > 0.3
    assert (found - expected)[real].abs().max() < TOLERANCE


@pytest.mark.parametrize("old_names", [False, True])
def test_hidden_states_are_those_of_transformers(tmp_path: Path, old_names: bool) -> None:
    theirs = bert(BertModel)
    saved(theirs, tmp_path)
    if old_names:
        rename_norms(tmp_path / "model.safetensors")
    checkpoint = read_huggingface(tmp_path)
    ids, mask, _ = batch()
    with torch.inference_mode():
        expected = theirs(ids, attention_mask=mask).last_hidden_state
        model = checkpoint.build()
        assert isinstance(model, Transformer)
        found = model.hidden_states(ids, mask.bool())
    assert (found - expected)[mask.bool()].abs().max() < TOLERANCE
    assert checkpoint.special_tokens.mask is None, "without a head nothing can be found"


def rename_norms(path: Path) -> None:
    """As the first checkpoints have them."""
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = load_file(path)
    for new, name in old.items():
        tensors = {key.replace(new, name): value for key, value in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_head_that_is_tied_but_has_numbers_of_its_own_is_refused(tmp_path: Path) -> None:
    path = saved(bert(), tmp_path) / "model.safetensors"
    tensors = load_file(path)
    for copy, original in (
        ("decoder.weight", "bert.embeddings.word_embeddings.weight"),
        ("decoder.bias", "cls.predictions.bias"),
    ):
        name, same = f"cls.predictions.{copy}", tensors[original].clone()
        save_file(tensors | {name: same}, path)
        read_huggingface(tmp_path)
        save_file(tensors | {name: same + 1}, path)
        with pytest.raises(UnsupportedError, match=rf"{name} with other numbers than {original}"):
            read_huggingface(tmp_path)


def write_tokenizer(directory: Path) -> None:
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.add_special_tokens(WORDS[:5])
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    inner.save(str(directory / "tokenizer.json"))
    names = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "pad": "[PAD]", "unk": "[UNK]"}
    config = {f"{part}_token": token for part, token in names.items()}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def sentence_directory(directory: Path, *kinds: str, **pooling: Any) -> Path:
    """As sentence-transformers writes it. `pooling`: its settings."""
    saved(bert(BertModel), directory)
    write_tokenizer(directory)
    paths = {"Transformer": ""}
    modules = [
        {
            "idx": index,
            "path": paths.get(kind, f"{index}_{kind}"),
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 48, **pooling})
    )
    return directory


def test_a_masked_model_knows_its_special_tokens(tmp_path: Path) -> None:
    saved(bert(), tmp_path)
    write_tokenizer(tmp_path)
    checkpoint = read_huggingface(tmp_path)
    special = checkpoint.special_tokens
    assert (special.bos, special.eos, special.pad, special.unk, special.mask) == (2, 3, 0, 1, 4)
    assert (checkpoint.prepend_bos, checkpoint.append_eos) == (True, True)
    assert checkpoint.stop_ids == ()
    assert checkpoint.tokenizer is not None
    ids = checkpoint.tokenizer.encode("The STATES of [MASK]", parse_special=True)
    assert ids == [5, 7, 9, 8, 4]


@pytest.mark.parametrize(
    ("modules", "settings", "pooling", "normalize"),
    [
        (("Transformer", "Pooling"), {"pooling_mode_cls_token": True}, "first", False),
        (
            ("Transformer", "Pooling", "Normalize"),
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False},
            "mean",
            True,
        ),
        (("Transformer", "Pooling", "Normalize"), {"pooling_mode": "lasttoken"}, "last", True),
    ],
)
def test_pooling_is_read_from_a_sentence_embedding_directory(
    tmp_path: Path,
    modules: tuple[str, ...],
    settings: dict[str, Any],
    pooling: str,
    normalize: bool,
) -> None:
    directory = sentence_directory(tmp_path / "theirs", *modules, **settings)
    save_checkpoint(tmp_path / "ours", find_source(str(directory)).read(lambda names: names))
    checkpoint = load_checkpoint(tmp_path / "ours")
    assert (checkpoint.pooling, checkpoint.normalize) == (pooling, normalize)
    assert (checkpoint.prepend_bos, checkpoint.append_eos) == (True, True)


@pytest.mark.parametrize(
    ("modules", "settings", "words"),
    [
        (("Transformer", "Pooling", "Dense"), {}, "lists Transformer, Pooling, Dense"),
        (("Transformer", "Pooling"), {"pooling_mode_max_tokens": True}, "pooling by max_tokens"),
        (
            ("Transformer", "Pooling"),
            {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True},
            "pooling by max_tokens, cls_token",
        ),
    ],
)
def test_other_ways_to_make_a_vector_are_refused_by_name(
    tmp_path: Path, modules: tuple[str, ...], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedError, match=words):
        read_huggingface(sentence_directory(tmp_path, *modules, **settings))


def test_texts_that_are_changed_before_they_are_read_are_refused(tmp_path: Path) -> None:
    directory = sentence_directory(
        tmp_path, "Transformer", "Pooling", pooling_mode_mean_tokens=True
    )
    path = directory / "config_sentence_transformers.json"
    path.write_text(json.dumps({"default_prompt_name": "query"}))
    with pytest.raises(UnsupportedError, match="puts its prompt 'query' before every text"):
        read_huggingface(directory)


def test_modules_stay_inside_the_directory(tmp_path: Path) -> None:
    sentence_directory(tmp_path, "Transformer", "Pooling")
    path = tmp_path / "modules.json"
    path.write_text(path.read_text().replace("1_Pooling", "../1_Pooling"))
    with pytest.raises(CheckpointError, match="isn't inside the directory"):
        read_huggingface(tmp_path)
