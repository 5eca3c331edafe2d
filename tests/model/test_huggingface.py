"""A Hugging Face directory becomes a checkpoint that computes what transformers computes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from model.errors import CheckpointError, ConfigError, UnsupportedError
from model.huggingface import read_huggingface

TOLERANCE = 1e-4
VOCAB_SIZE, CONTEXT = 300, 64
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
# With an original context of 32 the frequencies of 8-wide heads fall into all three ranges.
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32, "rope_theta": 500.0}


def llama(**changes: Any) -> Any:
    return randomised(LlamaForCausalLM(LlamaConfig(**(SIZES | changes))))


def gpt2(**changes: Any) -> Any:
    sizes = {"vocab_size": VOCAB_SIZE, "n_positions": CONTEXT, "n_embd": 48, "n_layer": 3}
    return randomised(GPT2LMHeadModel(GPT2Config(**(sizes | {"n_head": 4} | changes))))


def randomised(model: Any) -> Any:
    """Norms and biases too: fresh ones are ones and noughts, which would hide their mixing-up."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise * 0.1 + (1.0 if "norm" in name or ".ln_" in name else 0.0))
    return model.eval()


def saved(model: Any, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    return directory


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    settings = json.loads(path.read_text()) | changes
    settings = {name: value for name, value in settings.items() if value != "REMOVED"}
    path.write_text(json.dumps(settings))


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
    "gpt-2 with another bend": lambda: gpt2(activation_function="gelu", layer_norm_epsilon=1e-3),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_logits_are_those_of_transformers(tmp_path: Path, make: Callable[[], Any]) -> None:
    model = make()
    assert difference(saved(model, tmp_path), model) < TOLERANCE


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_becomes_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    saved(llama().to(dtype), tmp_path)
    reference = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(w.dtype == torch.float32 for w in read_huggingface(tmp_path).weights.values())
    assert difference(tmp_path, reference) < TOLERANCE


def test_shards_are_joined(tmp_path: Path) -> None:
    model = llama()
    saved(model, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert difference(tmp_path, model) < TOLERANCE


def test_gpt2_saved_without_its_head_is_read(tmp_path: Path) -> None:
    model = gpt2()
    saved(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare |= {"h.0.attn.bias": torch.ones(1, 1, CONTEXT, CONTEXT)}  # a mask, in GPT-2's own file
    save_file(bare, tmp_path / "model.safetensors")
    assert difference(tmp_path, model) < TOLERANCE


# --- what is refused ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["T5Model"]}, "T5Model; Quill reads LlamaForCausalLM"),
        ({"architectures": ["GPT2Model"]}, "GPT2Model"),
        ({"architectures": "REMOVED"}, "not named"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "part of each head"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"use_sliding_window": True}, "sliding_attention"),
    ],
)
def test_what_quill_does_not_know_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    change_config(saved(llama(), tmp_path), **changes)
    with pytest.raises(UnsupportedError, match=message):
        read_huggingface(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "gelu_fancy"}, "'gelu_fancy'"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ],
)
def test_unusual_gpt2_settings_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    change_config(saved(gpt2(), tmp_path), **changes)
    with pytest.raises(UnsupportedError, match=message):
        read_huggingface(tmp_path)


@pytest.mark.parametrize("window", [16, "REMOVED"])
def test_mistrals_sliding_window_is_refused_even_when_only_implied(
    tmp_path: Path, window: int | str
) -> None:
    sizes = SIZES | {"max_position_embeddings": 5000, "sliding_window": None, "head_dim": 8}
    saved(MistralForCausalLM(MistralConfig(**sizes)), tmp_path)
    change_config(tmp_path, sliding_window=window)
    with pytest.raises(UnsupportedError, match="sliding window"):
        read_huggingface(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "REMOVED"}, "hidden_size"),
        ({"hidden_size": "big"}, "'hidden_size' as 'big'"),
        ({"num_hidden_layers": 10**9}, "num_layers is 1000000000"),
        ({"num_hidden_layers": 1000}, "1000 layers"),
        ({"num_hidden_layers": 4}, r"lacks model\.layers\.3\."),
        ({"vocab_size": 999}, r"embed_tokens\.weight .* \(300, 48\).* \(999, 48\)"),
        ({"num_attention_heads": 0}, "num_heads is 0"),
    ],
)
def test_settings_that_do_not_fit_the_tensors_are_errors(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    change_config(saved(llama(), tmp_path), **changes)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        read_huggingface(tmp_path)


def change_tensors(directory: Path, changes: dict[str, torch.Tensor | None]) -> None:
    path = directory / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def test_missing_misshapen_unknown_and_mistyped_tensors_are_refused_by_name(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    saved(llama(), tmp_path)
    change_tensors(tmp_path, {name: None})
    with pytest.raises(CheckpointError, match=rf"lacks {name}"):
        read_huggingface(tmp_path)
    change_tensors(tmp_path, {name: torch.zeros(80, 47)})
    with pytest.raises(CheckpointError, match=rf"{name} .*\(80, 47\).*\(80, 48\)"):
        read_huggingface(tmp_path)
    change_tensors(tmp_path, {name: torch.zeros(80, 48, dtype=torch.int8)})
    with pytest.raises(UnsupportedError, match=rf"{name} .* type I8"):
        read_huggingface(tmp_path)
    change_tensors(tmp_path, {name: torch.zeros(80, 48), "model.layers.0.extra": torch.zeros(1)})
    with pytest.raises(UnsupportedError, match=r"no place for: model\.layers\.0\.extra"):
        read_huggingface(tmp_path)


def test_pickles_are_refused_with_what_to_do(tmp_path: Path) -> None:
    saved(llama(), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match=r"pickle .*Save the model again as safetensors"):
        read_huggingface(tmp_path)


def test_a_directory_without_weights_or_without_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_huggingface(tmp_path)
    saved(llama(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        read_huggingface(tmp_path)


def test_damaged_files_are_errors(tmp_path: Path) -> None:
    saved(llama(), tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"can't read .*model\.safetensors"):
        read_huggingface(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"can't read .*config\.json"):
        read_huggingface(tmp_path)


ELSEWHERE = ["../outside.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", "x.bin"]


@pytest.mark.parametrize("file", [*ELSEWHERE, "..\\x.safetensors", 7])
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, file: object) -> None:
    directory = saved(llama(), tmp_path / "model", max_shard_size="40KB")
    save_file({"lm_head.weight": torch.zeros(1)}, tmp_path / "outside.safetensors")
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = file
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"only \.safetensors files beside it"):
        read_huggingface(directory)


def test_a_shard_that_is_missing_or_lacks_its_tensor_is_an_error(tmp_path: Path) -> None:
    saved(llama(), tmp_path, max_shard_size="40KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    places = content["weight_map"]
    first, last = sorted(set(places.values()))[0], sorted(set(places.values()))[-1]
    name = next(name for name, place in places.items() if place == first)
    index.write_text(json.dumps({"weight_map": places | {name: last}}))
    with pytest.raises(CheckpointError, match=f"{name} is in {last}, but it isn't"):
        read_huggingface(tmp_path)
    (tmp_path / last).unlink()
    with pytest.raises(CheckpointError, match=f"lacks {last}"):
        read_huggingface(tmp_path)


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


def test_without_a_tokenizer_the_model_speaks_ids_only(tmp_path: Path) -> None:
    checkpoint = read_huggingface(saved(llama(eos_token_id=[7, 5]), tmp_path))
    assert checkpoint.tokenizer is None
    assert checkpoint.stop_ids == (5, 7)


def test_ids_beyond_the_vocabulary_are_not_taken_for_special_tokens(tmp_path: Path) -> None:
    checkpoint = read_huggingface(saved(gpt2(eos_token_id=[50256, 4]), tmp_path))
    assert checkpoint.stop_ids == (4,)
    assert (checkpoint.special_tokens.bos, checkpoint.special_tokens.eos) == (None, 4)


def test_a_token_beyond_the_embedding_is_an_error(chatty: Path) -> None:
    path = chatty / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 300, "content": "<far>"})
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="'<far>' with the id 300"):
        read_huggingface(chatty)


def test_name_and_version_come_from_the_hubs_cache(tmp_path: Path) -> None:
    directory = tmp_path / "models--some--model" / "snapshots" / ("c0ffee" * 7)
    directory.mkdir(parents=True)
    checkpoint = read_huggingface(saved(llama(), directory))
    assert checkpoint.provenance == {"name": "some/model", "version": "c0ffee" * 7}
