"""BERT and a sentence-embedding directory become checkpoints that compute the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertForMaskedLM, BertForPreTraining, BertModel

from quill.model.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from quill.model.errors import CheckpointError, UnsupportedError
from quill.model.importers.huggingface_directory import read_huggingface
from quill.model.importers.import_weights import open_checkpoint
from quill.model.network.attention import EncoderAttention
from quill.model.network.transformer import Transformer
from tests.model.huggingface_models import SIZES, bert, change_config, randomised, saved

TOLERANCE = 1e-4
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "union", "state", "of", "##s"]


def batch(length: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two rows, the second of them shorter, with two segments."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(300, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, length // 2 + 3 :] = 0
    return ids, mask, (torch.arange(length) > 11).long().expand(2, -1)


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


ROBERTA = {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 66}
DISTILBERT = {"dim": 48, "n_heads": 3, "n_layers": 3, "hidden_dim": 80}
DISTILBERT |= {"vocab_size": 300, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Bert", {"type_vocab_size": 2}),
        ("Roberta", ROBERTA),
        ("XLMRoberta", ROBERTA),
        ("DistilBert", DISTILBERT),
        ("MPNet", ROBERTA | {"max_position_embeddings": 202, "layer_norm_eps": 1e-5}),
    ],
)
@pytest.mark.parametrize("kind", ["Model", "ForMaskedLM", "ForSequenceClassification"])
def test_berts_descendants_compute_what_transformers_computes(
    tmp_path: Path, name: str, settings: dict[str, Any], kind: str
) -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    sizes |= {"num_attention_heads": 3} | settings
    sizes = (settings if "dim" in settings else sizes) | {"num_labels": 5}
    config = getattr(transformers, f"{name}Config")(**sizes)
    theirs = randomised(getattr(transformers, f"{name}{kind}")(config))
    ours = read_huggingface(saved(theirs, tmp_path)).build()
    assert isinstance(ours, Transformer)
    ids, mask, _ = batch(length=200 if name == "MPNet" else 40)  # so that distances share buckets
    ids = ids.clamp(min=2)  # the padding's id is no token
    ids[mask == 0] = settings.get("pad_token_id", 0)
    with torch.inference_mode():
        out = theirs(ids, attention_mask=mask)
        found = ours.hidden_states(ids, mask.bool())
        found = found if kind == "Model" else ours.project(found)
    expected = out.last_hidden_state if kind == "Model" else out.logits
    assert expected.std() > (0.1 if kind == "ForSequenceClassification" else 0.3)
    if kind == "ForSequenceClassification":
        found, expected = found[:, :1], expected[:, None]
        mask = mask[:, :1]
    assert (found - expected)[mask.bool()].abs().max() < TOLERANCE


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


@pytest.mark.parametrize("named", [True, False])
def test_a_masked_model_knows_its_special_tokens(tmp_path: Path, named: bool) -> None:
    saved(bert(), tmp_path)
    write_tokenizer(tmp_path)
    if not named:  # as bert-base-uncased has it
        (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    checkpoint = read_huggingface(tmp_path)
    special = checkpoint.special_tokens
    assert (special.bos, special.eos, special.pad, special.mask) == (2, 3, 0, 4)
    assert special.unk == (1 if named else None)
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
    save_checkpoint(tmp_path / "ours", open_checkpoint(directory))
    checkpoint = load_checkpoint(tmp_path / "ours")
    assert (checkpoint.pooling, checkpoint.normalize) == (pooling, normalize)
    assert (checkpoint.prepend_bos, checkpoint.append_eos) == (True, True)


def test_a_sentence_embedding_model_that_names_a_head_which_was_not_saved_has_none(
    tmp_path: Path,
) -> None:
    directory = sentence_directory(
        tmp_path, "Transformer", "Pooling", pooling_mode_mean_tokens=True
    )
    change_config(directory, architectures=["BertForMaskedLM"])
    checkpoint = read_huggingface(directory)
    assert not checkpoint.config.masked_head
    assert checkpoint.special_tokens.mask is None
    (directory / "modules.json").unlink()
    with pytest.raises(CheckpointError, match=r"lacks cls\.predictions\."):
        read_huggingface(directory)


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


@pytest.mark.parametrize(
    ("file", "settings", "context"),
    [
        ("sentence_bert_config.json", {"max_seq_length": 24}, 24),
        ("sentence_roberta_config.json", {"max_seq_length": 24}, 24),
        ("sentence_bert_config.json", {"max_seq_length": 4000}, 64),
        ("sentence_bert_config.json", {"max_seq_length": None}, 64),
        ("tokenizer_config.json", {"model_max_length": 24}, 24),
        ("tokenizer_config.json", {"model_max_length": int(1e30)}, 64),
    ],
)
def test_the_context_is_where_sentence_transformers_cuts_texts_off(
    tmp_path: Path, file: str, settings: dict[str, Any], context: int
) -> None:
    directory = sentence_directory(
        tmp_path / "theirs", "Transformer", "Pooling", pooling_mode_mean_tokens=True
    )
    whole = read_huggingface(directory)
    (directory / file).write_text(json.dumps(settings))
    save_checkpoint(tmp_path / "ours", read_huggingface(directory))
    checkpoint = load_checkpoint(tmp_path / "ours")
    assert (whole.config.context, checkpoint.config.context) == (64, context)
    ids_BT = torch.randint(300, (1, context), generator=torch.Generator())
    found, expected = checkpoint.build(), whole.build()
    assert isinstance(found, Transformer)
    assert isinstance(expected, Transformer)
    with torch.inference_mode():
        assert torch.equal(found.hidden_states(ids_BT), expected.hidden_states(ids_BT))


def test_a_limit_that_lets_no_token_through_is_refused(tmp_path: Path) -> None:
    directory = sentence_directory(
        tmp_path, "Transformer", "Pooling", pooling_mode_mean_tokens=True
    )
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 0}')
    with pytest.raises(CheckpointError, match="max_seq_length is 0; it must be positive"):
        read_huggingface(directory)


def test_modules_stay_inside_the_directory(tmp_path: Path) -> None:
    sentence_directory(tmp_path, "Transformer", "Pooling")
    path = tmp_path / "modules.json"
    path.write_text(path.read_text().replace("1_Pooling", "../1_Pooling"))
    with pytest.raises(CheckpointError, match="isn't inside the directory"):
        read_huggingface(tmp_path)


def test_indices_of_positions_that_older_files_hold_take_no_part(tmp_path: Path) -> None:
    expected = read_huggingface(saved(bert(BertModel), tmp_path)).build()
    path = tmp_path / "model.safetensors"
    indices = {"embeddings.position_ids": torch.arange(64).unsqueeze(0)}
    save_file(load_file(path) | indices, path, metadata={"format": "pt"})
    found = read_huggingface(tmp_path).build()
    assert found.state_dict().keys() == expected.state_dict().keys()
