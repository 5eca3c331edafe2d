"""A Hugging Face directory becomes a checkpoint that computes what transformers computes."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from quill.model.errors import CheckpointError
from quill.model.importers.huggingface_directory import read_huggingface
from tests.model.huggingface_models import (
    CONTEXT,
    SIZES,
    VOCAB_SIZE,
    change_config,
    gpt2,
    llama,
    randomised,
    saved,
)
from tests.model.successors import SUCCESSORS

TOLERANCE = 1e-4
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
# With an original context of 32 the frequencies of 8-wide heads fall into all three ranges.
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32, "rope_theta": 500.0}


def difference(directory: Path, reference: Any) -> float:
    ids_BT = torch.randint(0, VOCAB_SIZE, (2, CONTEXT), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        ours, theirs = read_huggingface(directory).build()(ids_BT), reference(ids_BT).logits
    assert theirs.abs().max() > 0.5
    return float((ours - theirs).abs().max())


MODELS: dict[str, Callable[[], Any]] = {
    "grouped heads, untied": lambda: llama(tie_word_embeddings=False),
    "grouped heads, tied": lambda: llama(tie_word_embeddings=True),
    "linear scaling": lambda: llama(rope_parameters=LINEAR),
    "llama3 scaling": lambda: llama(rope_parameters=LLAMA3),
    "biases everywhere": lambda: llama(attention_bias=True, mlp_bias=True),
    "a head size of its own": lambda: llama(head_dim=16),
    "as many k/v heads as heads": lambda: llama(num_key_value_heads=6, rms_norm_eps=1e-3),
    "mistral": lambda: randomised(
        MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None, head_dim=8))
    ),
    "qwen2": lambda: randomised(Qwen2ForCausalLM(Qwen2Config(**SIZES))),
    "gpt-2": gpt2,
    "gpt-2 untied": lambda: gpt2(tie_word_embeddings=False, n_inner=100),
    "gpt-2 with gelu": lambda: gpt2(activation_function="gelu", layer_norm_epsilon=1e-3),
}


@pytest.mark.parametrize("name", [*MODELS, *SUCCESSORS])
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """At once, and with a KV cache in chunks."""
    theirs = (MODELS | SUCCESSORS)[name]()
    ours = read_huggingface(saved(theirs, tmp_path)).build()
    sizes = theirs.config
    ids_BT = torch.randint(
        sizes.vocab_size,
        (2, sizes.max_position_embeddings),
        generator=torch.Generator().manual_seed(3),
    )
    with torch.inference_mode():
        expected, found = theirs(ids_BT).logits, ours(ids_BT)
        cache = ours.cached()
        chunks = torch.tensor_split(ids_BT, (50, 51, 52), dim=1)
        cached = torch.cat([ours.project(ours.hidden(ids, cache)) for ids in chunks], dim=1)
    assert expected.std() > 0.1
    for logits in (found, cached):
        assert float((logits - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize("rope", [LINEAR, LLAMA3], ids=["linear", "llama3"])
def test_rotary_scaling_in_the_spelling_of_transformers_4_is_read(
    tmp_path: Path, rope: dict[str, Any]
) -> None:
    model = llama(rope_parameters=rope)
    saved(model, tmp_path)
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    if scaling["rope_type"] == "linear":  # the oldest spelling
        scaling["type"] = scaling.pop("rope_type")
    theta = rope["rope_theta"]
    change_config(tmp_path, rope_parameters="REMOVED", rope_scaling=scaling, rope_theta=theta)
    assert difference(tmp_path, model) < TOLERANCE


def test_phi_3s_original_context_is_that_beside_its_rotary_settings(tmp_path: Path) -> None:
    theirs = saved(SUCCESSORS["phi-3 with longrope"](), tmp_path)
    rope = json.loads((theirs / "config.json").read_text())["rope_parameters"]
    name, found = "original_max_position_embeddings", []
    for changes in ({}, {"rope_parameters": rope | {name: 9}}, {name: "REMOVED"}):
        rope.pop(name, None)
        change_config(theirs, **({"rope_parameters": rope} | changes))
        scaling = read_huggingface(theirs).config.rotary_scaling
        assert scaling is not None
        found.append(scaling.original_context)
    assert found == [1, 1, 4096]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_as_it_is(tmp_path: Path, dtype: torch.dtype) -> None:
    saved(llama().to(dtype), tmp_path)
    reference = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(w.dtype == dtype for w in read_huggingface(tmp_path).weights.values())
    assert difference(tmp_path, reference) < TOLERANCE


def test_shards_are_joined(tmp_path: Path) -> None:
    model = llama()
    saved(model, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert difference(tmp_path, model) < TOLERANCE


def test_a_decoder_saved_without_its_head_is_read(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True)
    path = saved(model, tmp_path) / "model.safetensors"
    save_file({name.removeprefix("model."): each for name, each in load_file(path).items()}, path)
    assert difference(tmp_path, model) < TOLERANCE


def test_gpt2_saved_without_its_head_is_read(tmp_path: Path) -> None:
    model = gpt2()
    saved(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare |= {"h.0.attn.bias": torch.ones(1, 1, CONTEXT, CONTEXT)}  # a mask, in GPT-2's own file
    save_file(bare, tmp_path / "model.safetensors")
    assert difference(tmp_path, model) < TOLERANCE


# --- text ---


def write_tokenizer(directory: Path, with_bos: bool) -> None:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True) for token in ("<bos>", "<eos>", "<turn>")]
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["the cat and the dog and the bird"] * 3, trainer)
    if with_bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 0)]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>")
    tokenizer.eos_token = "<eos>"
    tokenizer.chat_template = "{{ messages[0]['content'] }}<turn>"
    tokenizer.save_pretrained(directory)


@pytest.fixture
def chatty(tmp_path: Path) -> Path:
    """A model with everything beside it."""
    saved(llama(), tmp_path)
    write_tokenizer(tmp_path, with_bos=True)
    generation = {"eos_token_id": [1, 2], "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "README.md").write_text("---\nlanguage: en\nlicense: mit\n---\n# A model\n")
    return tmp_path


def test_text_is_tokenized_as_by_transformers(chatty: Path) -> None:
    ours, theirs = read_huggingface(chatty).tokenizer, AutoTokenizer.from_pretrained(chatty)
    assert ours is not None
    for text in ("the cat", "  thé\n\t日本 🦜", "a<turn>b <eos>", "", "12 dogs' birds"):
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, parse_special=True) == ids
        assert ours.decode(ids) == text


def test_special_tokens_stops_template_defaults_and_licence_come_along(chatty: Path) -> None:
    checkpoint = read_huggingface(chatty)
    assert (checkpoint.special_tokens.bos, checkpoint.special_tokens.eos) == (0, 1)
    assert checkpoint.prepend_bos
    assert checkpoint.stop_ids == (1, 2)
    assert checkpoint.chat_template == "{{ messages[0]['content'] }}<turn>"
    assert checkpoint.generation == {"temperature": 0.6, "top_p": 0.9}
    assert checkpoint.provenance["licence"] == "mit"


def test_a_bos_that_the_tokenizer_does_not_add_is_not_prepended(tmp_path: Path) -> None:
    write_tokenizer(saved(llama(), tmp_path), with_bos=False)
    checkpoint = read_huggingface(tmp_path)
    assert checkpoint.special_tokens.bos == 0
    assert not checkpoint.prepend_bos


def test_a_decoder_that_embeds_ends_texts_as_its_tokenizer_does(tmp_path: Path) -> None:
    """Qwen3-Embedding's eos ends an answer, and another token every text."""
    write_tokenizer(saved(llama(), tmp_path), with_bos=False)
    inner = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.post_processor = processors.TemplateProcessing(
        single="$A <turn>", special_tokens=[("<turn>", 2)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    checkpoint = read_huggingface(tmp_path)
    assert (checkpoint.special_tokens.eos, checkpoint.append_eos) == (1, False)
    modules = [
        {"idx": 0, "path": "", "type": "models.Transformer"},
        {"idx": 1, "path": "1_Pooling", "type": "models.Pooling"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text('{"pooling_mode": "lasttoken"}')
    checkpoint = read_huggingface(tmp_path)
    assert (checkpoint.special_tokens.eos, checkpoint.append_eos) == (2, True)
    assert 1 in checkpoint.stop_ids


def test_without_sampling_the_default_is_greedy(chatty: Path) -> None:
    settings = {"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.1}
    (chatty / "generation_config.json").write_text(json.dumps(settings))
    assert read_huggingface(chatty).generation == {"temperature": 0.0, "repetition_penalty": 1.1}


@pytest.mark.parametrize("spelling", ["jinja", "json", "config", "list"])
def test_the_chat_template_is_found_in_every_spelling(chatty: Path, spelling: str) -> None:
    (chatty / "chat_template.jinja").unlink()
    config = json.loads((chatty / "tokenizer_config.json").read_text())
    if spelling == "jinja":
        (chatty / "chat_template.jinja").write_text("new")
    elif spelling == "json":
        (chatty / "chat_template.json").write_text(json.dumps({"chat_template": "new"}))
    else:
        named = [{"name": "tools", "template": "x"}, {"name": "default", "template": "new"}]
        config["chat_template"] = "new" if spelling == "config" else named
    (chatty / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_huggingface(chatty).chat_template == "new"


def test_without_a_tokenizer_the_model_takes_ids_only(tmp_path: Path) -> None:
    checkpoint = read_huggingface(saved(llama(eos_token_id=[7, 5]), tmp_path))
    assert checkpoint.tokenizer is None
    assert checkpoint.stop_ids == (5, 7)


def test_ids_beyond_the_vocabulary_are_not_taken_for_special_tokens(tmp_path: Path) -> None:
    checkpoint = read_huggingface(saved(gpt2(eos_token_id=[50256, 4]), tmp_path))
    assert checkpoint.stop_ids == (4,)
    assert (checkpoint.special_tokens.bos, checkpoint.special_tokens.eos) == (None, 4)


def test_tokens_beyond_the_embedding_are_an_error(chatty: Path) -> None:
    path = chatty / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 300, "content": "<far>"})
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="'<far>' with the id 300"):
        read_huggingface(chatty)
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(301)}, unk_token="w0")).save(str(path))
    with pytest.raises(CheckpointError, match="'w300' with the id 300"):
        read_huggingface(chatty)


def test_texts_are_neither_cut_nor_filled_up_whatever_the_tokenizer_says(chatty: Path) -> None:
    path = chatty / "tokenizer.json"
    inner = Tokenizer.from_file(str(path))
    whole = inner.encode("of the people", add_special_tokens=False).ids
    assert len(whole) > 1
    for change, options in (
        ("enable_truncation", {"max_length": 1}),
        ("enable_padding", {"length": 99}),
    ):
        getattr(inner, change)(**options)
        inner.save(str(path))
        tokenizer = read_huggingface(chatty).tokenizer
        assert tokenizer is not None
        assert tokenizer.encode("of the people") == whole
        assert tokenizer.encode_all(["of the people"]) == [whole]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", -0.5), ("temperature", math.nan), ("top_k", -1), ("top_k", 2.5)),
        *(("top_p", 7), ("min_p", -1), ("repetition_penalty", 0), ("max_new_tokens", 0)),
    ],
)
def test_an_authors_default_that_no_request_could_have_is_an_error(
    tmp_path: Path, name: str, value: float
) -> None:
    settings = {"do_sample": True, name: value}
    (saved(llama(), tmp_path) / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=rf"generation_config\.json has {name} {value}"):
        read_huggingface(tmp_path)


def test_name_and_version_come_from_the_hubs_cache(tmp_path: Path) -> None:
    directory = tmp_path / "models--some--model" / "snapshots" / ("c0ffee" * 7)
    directory.mkdir(parents=True)
    checkpoint = read_huggingface(saved(llama(), directory))
    assert checkpoint.provenance == {"name": "some/model", "version": "c0ffee" * 7}
