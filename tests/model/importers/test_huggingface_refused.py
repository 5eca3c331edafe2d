"""Hugging Face directories that are unsupported or damaged: errors that name the cause."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MistralConfig, MistralForCausalLM

from quill.model.errors import CheckpointError, ConfigError, UnsupportedError
from quill.model.importers.huggingface_directory import read_huggingface
from tests.model.huggingface_models import SIZES, bert, change_config, gpt2, llama, saved
from tests.model.successors import SUCCESSORS

GEMMA_3, DEEPSEEK = SUCCESSORS["gemma 3"], SUCCESSORS["deepseek-v3"]
STABLELM, SMOLLM3 = SUCCESSORS["stablelm"], SUCCESSORS["smollm3"]
GPT_OSS, LFM2 = SUCCESSORS["gpt-oss"], SUCCESSORS["lfm2"]
QWEN2_MOE, GRANITE = SUCCESSORS["qwen2-moe"], SUCCESSORS["granite"]
UNSUPPORTED: list[tuple[Callable[[], Any], dict[str, Any], str]] = [
    (llama, {"architectures": ["T5Model"]}, "T5Model; Quill reads LlamaForCausalLM"),
    (llama, {"architectures": ["GPT2Model"]}, "GPT2Model"),
    (llama, {"architectures": "REMOVED"}, "not named"),
    (llama, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    (llama, {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config, of mxfp4"),
    (GPT_OSS, {"quantization_config": {"quant_method": "awq"}}, "quantization_config, of awq"),
    (GPT_OSS, {"swiglu_limit": 0}, "swiglu_limit is 0"),
    (LFM2, {"layer_types": ["conv", "linear_attention", "conv"]}, "layers of linear_attention"),
    (LFM2, {"block_multiple_of": 0}, "block_multiple_of is 0"),
    (LFM2, {"architectures": ["Lfm2MoeForCausalLM"]}, "Lfm2MoeForCausalLM; Quill reads"),
    (LFM2, {"architectures": ["Qwen3NextForCausalLM"]}, "Qwen3NextForCausalLM; Quill reads"),
    (LFM2, {"architectures": ["Qwen3_5ForCausalLM"]}, "Qwen3_5ForCausalLM; Quill reads"),
    (llama, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    (llama, {"is_causal": False}, "is_causal False; Quill knows True only"),
    (llama, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    (STABLELM, {"use_parallel_residual": True}, "use_parallel_residual True"),
    (STABLELM, {"qk_layernorm": True}, "qk_layernorm True"),
    (SMOLLM3, {"no_rope_layers": [0, 0, 1]}, r"no_rope_layers are \[0, 0, 1\]"),
    (QWEN2_MOE, {"shared_expert_intermediate_size": 33}, "shared_expert_intermediate_size is 33"),
    (llama, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    (llama, {"use_sliding_window": True}, "use_sliding_window"),
    # It has priority over rope_parameters, as in transformers.
    (llama, {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "'ntk'"),
    (llama, {"rope_parameters": {"full_attention": {"rope_theta": 9.0}}}, "each kind of layer"),
    (gpt2, {"activation_function": "gelu_fancy"}, "'gelu_fancy'"),
    (gpt2, {"scale_attn_weights": False}, "scale_attn_weights"),
    (gpt2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    (DEEPSEEK, {"rope_interleave": False}, "rope_interleave"),
    (bert, {"architectures": ["RobertaModel"], "pad_token_id": 5}, "pad_token_id 5"),
    (
        bert,
        {"architectures": ["MPNetModel"], "pad_token_id": 1, "relative_attention_num_buckets": 8},
        "num_buckets 8",
    ),
    (bert, {"architectures": ["ModernBertModel"]}, "ModernBertModel"),
    (bert, {"is_decoder": True}, "is_decoder True; Quill knows False"),
    (bert, {"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
    (bert, {"hidden_act": "mish"}, "hidden_act is 'mish'; Quill knows gelu"),
    (bert, {"tie_word_embeddings": False}, "tie_word_embeddings False"),
]
INVALID: list[tuple[Callable[[], Any], dict[str, Any], str]] = [
    (GRANITE, {"logits_scaling": 0}, "logits_scaling isn't positive"),
    (LFM2, {"conv_L_cache": 0}, "taps is 0"),
    (LFM2, {"conv_L_cache": 4}, r"conv\.conv\.weight .* \(64, 1, 3\).* \(64, 1, 4\)"),
    (LFM2, {"layer_types": ["conv"]}, "1 layer_types for 3 layers"),
    (GPT_OSS, {"swiglu_alpha": 0}, "slope of the experts is 0"),
    (GRANITE, {"residual_multiplier": 0}, "residual_scale is 0"),
    (llama, {"rope_parameters": {"rope_type": "longrope", "short_factor": 1}}, "short_factor"),
    (llama, {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "1 divisors"),
    (GEMMA_3, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0.0"),
    (GEMMA_3, {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar is -1.0"),
    (GEMMA_3, {"sliding_window_pattern": 0, "layer_types": None}, "sliding_window_pattern is 0"),
    (GEMMA_3, {"layer_types": "full_attention"}, "'layer_types' as 'full_attention'"),
    (GEMMA_3, {"layer_types": ["sliding_attention"]}, "1 layer_types for 2 layers"),
    (llama, {"hidden_size": "REMOVED"}, "hidden_size"),
    (llama, {"hidden_size": "big"}, "'hidden_size' as 'big'"),
    (llama, {"num_hidden_layers": 10**9}, "num_layers is 1000000000"),
    (llama, {"num_hidden_layers": 1000}, "1000 layers"),
    (llama, {"num_hidden_layers": 4}, r"lacks model\.layers\.3\."),
    (llama, {"vocab_size": 999}, r"embed_tokens\.weight .* \(300, 48\).* \(999, 48\)"),
    (llama, {"num_attention_heads": 0}, "num_heads is 0"),
]


@pytest.mark.parametrize(("make", "changes", "message"), UNSUPPORTED)
def test_an_unsupported_setting_is_named(
    tmp_path: Path, make: Callable[[], Any], changes: dict[str, Any], message: str
) -> None:
    change_config(saved(make(), tmp_path), **changes)
    with pytest.raises(UnsupportedError, match=message):
        read_huggingface(tmp_path)


@pytest.mark.parametrize(
    ("file", "settings", "message"),
    [
        ("adapter_config.json", {"peft_type": "LORA"}, "has an adapter .*merge_and_unload"),
        ("generation_config.json", {"bad_words_ids": [[5]]}, "has bad_words_ids; .* Take it out"),
        ("generation_config.json", {"suppress_tokens": [5]}, "has suppress_tokens; "),
        ("generation_config.json", {"sequence_bias": [[[5], -9.0]]}, "has sequence_bias; "),
    ],
)
def test_a_file_that_would_change_answers_is_named(
    tmp_path: Path, file: str, settings: dict[str, Any], message: str
) -> None:
    (saved(llama(), tmp_path) / file).write_text(json.dumps(settings))
    with pytest.raises(UnsupportedError, match=message):
        read_huggingface(tmp_path)


@pytest.mark.parametrize(("make", "changes", "message"), INVALID)
def test_a_setting_that_is_invalid_or_does_not_fit_the_tensors_is_named(
    tmp_path: Path, make: Callable[[], Any], changes: dict[str, Any], message: str
) -> None:
    change_config(saved(make(), tmp_path), **changes)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        read_huggingface(tmp_path)


@pytest.mark.parametrize(("window", "read"), [(16, 16), ("REMOVED", 4096), (None, 0), (5000, 0)])
def test_mistrals_sliding_window_is_read_even_when_only_implied(
    tmp_path: Path, window: int | str | None, read: int
) -> None:
    sizes = SIZES | {"max_position_embeddings": 5000, "sliding_window": None, "head_dim": 8}
    saved(MistralForCausalLM(MistralConfig(**sizes)), tmp_path)
    change_config(tmp_path, sliding_window=window)
    assert read_huggingface(tmp_path).config.window == read


def test_a_window_that_layer_types_contradict_is_refused(tmp_path: Path) -> None:
    sizes = SIZES | {"sliding_window": 16, "head_dim": 8}
    saved(MistralForCausalLM(MistralConfig(**sizes)), tmp_path)
    change_config(tmp_path, layer_types=["full_attention"] * 3)  # transformers doesn't look at it
    with pytest.raises(UnsupportedError, match="layer_types"):
        read_huggingface(tmp_path)


@pytest.mark.parametrize(
    ("changes", "caps"), [("REMOVED", (50.0, 30.0)), (None, (0.0, 0.0)), (7.0, (7.0, 7.0))]
)
def test_gemma_2_caps_its_scores_and_logits_unless_told_not_to(
    tmp_path: Path, changes: object, caps: tuple[float, float]
) -> None:
    saved(SUCCESSORS["gemma 2"](), tmp_path)
    change_config(tmp_path, attn_logit_softcapping=changes, final_logit_softcapping=changes)
    config = read_huggingface(tmp_path).config
    assert (config.attention_soft_cap, config.logit_soft_cap) == caps


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
    change_tensors(tmp_path, {name: torch.zeros(80, 48).to(torch.float8_e4m3fn)})
    with pytest.raises(UnsupportedError, match=f"{name} in .* is of type F8_E4M3; Quill reads F64"):
        read_huggingface(tmp_path)
    change_tensors(tmp_path, {name: torch.zeros(80, 48, dtype=torch.int8)})
    with pytest.raises(UnsupportedError, match=rf"{name} .* type int8"):
        read_huggingface(tmp_path)
    change_tensors(tmp_path, {name: torch.zeros(80, 48), "model.layers.0.extra": torch.zeros(1)})
    with pytest.raises(UnsupportedError, match=r"no place for: model\.layers\.0\.extra"):
        read_huggingface(tmp_path)


def test_an_output_that_is_tied_but_has_numbers_of_its_own_is_refused(tmp_path: Path) -> None:
    tensors = saved(llama(tie_word_embeddings=True), tmp_path) / "model.safetensors"
    embedding = load_file(tensors)["model.embed_tokens.weight"]
    change_tensors(tmp_path, {"lm_head.weight": embedding.clone()})
    assert "projection.weight" not in read_huggingface(tmp_path).weights
    for other in (embedding + 1, embedding[:-1].clone()):
        change_tensors(tmp_path, {"lm_head.weight": other})
        with pytest.raises(UnsupportedError, match=r"lm_head\.weight .*tie_word_embeddings"):
            read_huggingface(tmp_path)


class Harmful:
    """What a pickle can do: call anything."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("harmed"),))


def test_a_pickle_that_would_run_code_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (saved(llama(), tmp_path) / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Harmful()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match=r"pickle .*Save the model again as safetensors"):
        read_huggingface(tmp_path)
    assert not Path("harmed").exists()
    for content in ([torch.zeros(1)], {"a": 1}):
        torch.save(content, tmp_path / "pytorch_model.bin")
        with pytest.raises(UnsupportedError, match="something else than tensors"):
            read_huggingface(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x80\x02", b"\x80\x02" + b"(" * 99 + b"."])
def test_a_damaged_pickle_is_an_error(tmp_path: Path, content: bytes) -> None:
    (saved(llama(), tmp_path) / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(UnsupportedError, match=r"can't be read as a pickle of tensors only: .+"):
        read_huggingface(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: torch.zeros(1).expand(tensor.shape),
        lambda tensor: tensor.to_sparse(),
        lambda tensor: tensor.to("meta"),
    ],
)
def test_a_pickled_tensor_without_numbers_of_its_own_is_refused_by_name(
    tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """A file of some bytes could ask for any amount of memory."""
    path = saved(llama(), tmp_path) / "model.safetensors"
    tensors, name = load_file(path), "model.embed_tokens.weight"
    path.unlink()
    torch.save(tensors | {name: change(tensors[name])}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match=rf"{name} in .* has fewer numbers"):
        read_huggingface(tmp_path)


@pytest.mark.parametrize("is_old", [False, True])
def test_pickles_of_tensors_are_read(tmp_path: Path, is_old: bool) -> None:
    saved(llama(), tmp_path)
    expected = dict(read_huggingface(tmp_path).weights)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    path = tmp_path / "pytorch_model.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=not is_old)
    weights = read_huggingface(tmp_path).weights
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_is_refused_by_its_tensors_name(
    tmp_path: Path, value: float
) -> None:
    saved(llama().to(torch.bfloat16), tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensors(tmp_path, {name: torch.full((80, 48), value, dtype=torch.bfloat16)})
    weights = read_huggingface(tmp_path).weights
    with pytest.raises(CheckpointError, match=f"{name} has a NaN or an infinity"):
        dict(weights)


def test_a_directory_without_weights_or_without_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_huggingface(tmp_path)
    saved(llama(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no weights: none of model\.safetensors"):
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
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has an empty config\.json"):
        read_huggingface(tmp_path)


ELSEWHERE = ["../outside.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", "x.bin"]


def test_an_index_that_is_nested_too_deeply_is_an_error(tmp_path: Path) -> None:
    (saved(llama(), tmp_path) / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"can't read .*index\.json"):
        read_huggingface(tmp_path)


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
    with pytest.raises(CheckpointError, match=f"{name} in {last}, but it isn't"):
        read_huggingface(tmp_path)
    (tmp_path / last).unlink()
    with pytest.raises(CheckpointError, match=f"lacks {last}"):
        read_huggingface(tmp_path)


def test_a_whole_file_counts_before_shards_as_in_transformers(tmp_path: Path) -> None:
    saved(llama(), tmp_path, max_shard_size="40KB")
    shards = {path.name: path.read_bytes() for path in tmp_path.glob("model*")}
    saved(llama(rms_norm_eps=1e-5), tmp_path)  # it deletes the shards
    for name, content in shards.items():
        (tmp_path / name).write_bytes(content)
    change_tensors(tmp_path, {"model.norm.weight": torch.full((48,), 7.0)})
    assert float(read_huggingface(tmp_path).weights["decoder_norm.weight"].mean()) == 7.0
