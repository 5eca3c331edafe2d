"""Each GGUF architecture computes what transformers computes with the weights it was made of."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from quill.model.errors import UnsupportedError
from quill.model.importers.gguf_config import ARCHITECTURES
from quill.model.importers.gguf_file import GgufFile
from quill.model.importers.gguf_llama import read_gguf
from quill.model.network.transformer import Transformer
from tests.model.conftest import TINY, Array, tiny_metadata, write_gguf
from tests.model.huggingface_models import randomised
from tests.model.successors import CONTEXT, GPT_OSS, LFM2, PART, YARN, made

TOLERANCE = 1e-4
SIZES: dict[str, Any] = {"vocab_size": TINY.vocab_size, "rms_norm_eps": 1e-5}
GEMMA = SIZES | {"head_dim": 32, "sliding_window": 20, "tie_word_embeddings": True}

# The model, and what its files have beside what all have.
Case = tuple[Callable[[], Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "llama": (lambda: made("Llama", **SIZES), {}),
    "llama, mixtral": (
        lambda: made("Mixtral", **SIZES, num_local_experts=5, num_experts_per_tok=2),
        {"expert_count": 5, "expert_used_count": 2, "rope.freq_base": 1e6},
    ),
    "qwen2": (lambda: made("Qwen2", **SIZES), {}),
    "qwen3": (lambda: made("Qwen3", **SIZES, head_dim=32), {"attention.key_length": 32}),
    "qwen3moe": (
        lambda: made(
            "Qwen3Moe",
            **SIZES,
            head_dim=16,
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=64,
            norm_topk_prob=True,
        ),
        {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 64},
    ),
    "olmo2": (lambda: made("Olmo2", **SIZES), {}),
    "olmo2, olmo-3": (
        lambda: made(
            "Olmo3",
            **SIZES,
            sliding_window=20,
            num_hidden_layers=4,
            rope_parameters={
                "full_attention": YARN | {"rope_theta": 1e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
        {
            "attention.sliding_window": 20,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 24,
            "rope.scaling.yarn_beta_fast": 4.0,
        },
    ),
    "gptneox": (
        lambda: made("GPTNeoX", **SIZES, num_key_value_heads=4, rope_parameters=PART),
        {
            "rope.dimension_count": 8,
            "attention.layer_norm_epsilon": 1e-5,
            "use_parallel_residual": True,
        },
    ),
    "phi3": (
        lambda: made("Phi3", **SIZES, sliding_window=33),
        {"attention.sliding_window": 33, "rope.dimension_count": 16},
    ),
    "phi3, longrope": (
        lambda: made(
            "Phi3",
            **SIZES,
            rope_parameters=PART
            | {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.0, 2.0, 3.0, 5.0],
                "original_max_position_embeddings": 8,
            },
            original_max_position_embeddings=8,
        ),
        {"rope.dimension_count": 8, "rope.scaling.original_context_length": 8},
    ),
    "qwen2, yarn": (
        lambda: made(
            "Qwen2",
            **SIZES,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 24,
            },
        ),
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 24,
        },
    ),
    "phi2": (
        lambda: made("Phi", **SIZES, num_key_value_heads=4, rope_parameters=PART),
        {"rope.dimension_count": 8, "attention.layer_norm_epsilon": 1e-5},
    ),
    "stablelm": (
        lambda: made("StableLm", **SIZES, use_qkv_bias=True, rope_parameters=PART),
        {"rope.dimension_count": 8, "attention.layer_norm_epsilon": 1e-5},
    ),
    "smollm3": (
        lambda: made("SmolLM3", **SIZES, num_hidden_layers=5),
        {"rope.freq_base": 2e6},
    ),
    "granite": (
        lambda: made(
            "Granite",
            **SIZES,
            attention_multiplier=0.2,
            embedding_multiplier=3.0,
            residual_multiplier=0.7,
            logits_scaling=2.5,
        ),
        {"attention.scale": 0.2, "embedding_scale": 3.0, "residual_scale": 0.7, "logit_scale": 2.5},
    ),
    "gpt-oss": (
        lambda: made("GptOss", **(SIZES | GPT_OSS | {"swiglu_limit": 7.0})),
        {
            "attention.key_length": 16,
            "attention.value_length": 16,
            "attention.sliding_window": 20,
            "expert_count": 5,
            "expert_used_count": 2,
            "expert_feed_forward_length": 96,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 24,
            "rope.scaling.yarn_beta_fast": 4.0,
        },
    ),
    "lfm2": (
        lambda: made("Lfm2", **(SIZES | LFM2)),
        {"attention.head_count_kv": [0, 2, 0], "rope.freq_base": 1e6, "shortconv.l_cache": 3}
        | {"feed_forward_length": 64},
    ),
    "gemma": (
        lambda: made("Gemma", **SIZES, head_dim=32, tie_word_embeddings=True),
        {"attention.key_length": 32, "attention.value_length": 32},
    ),
    "gemma2": (
        lambda: made("Gemma2", **GEMMA, query_pre_attn_scalar=32),
        {
            "attention.key_length": 32,
            "attention.value_length": 32,
            "attention.sliding_window": 20,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        lambda: made("Gemma3", **GEMMA, num_hidden_layers=7, query_pre_attn_scalar=32),
        {
            "attention.key_length": 32,
            "attention.value_length": 32,
            "attention.sliding_window": 20,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "none",
        },
    ),
}


def settings_of(model: Any, architecture: str, **own: Any) -> dict[str, Any]:
    config = model.config
    settings = {
        "context_length": CONTEXT,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10_000.0,
    }
    entries = {f"{architecture}.{name}": value for name, value in (settings | own).items()}
    text = {name: value for name, value in tiny_metadata().items() if "tokenizer" in name}
    return entries | text


def permuted(tensor: Tensor, num_heads: int) -> Tensor:
    """As llama.cpp's converter does for interleaved rotation."""
    return torch.unflatten(tensor, 0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def fused(model: Any) -> dict[str, Tensor]:
    """Queries, keys and values in one."""
    state = dict(model.state_dict())
    for name in [name for name in state if ".q_proj" in name]:
        parts = [state.pop(name.replace(".q_", f".{each}_")) for each in "qkv"]
        state[name.replace("self_attn.q_proj", "self_attn.qkv_proj")] = torch.cat(parts)
    return state


def split_experts(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """transformers stacks them, and gates with values."""
    for name in [name for name in state if "experts." in name]:
        tensor, layer = state.pop(name), name.split(".")[2]
        if name.endswith("_bias") or f"{name}_bias" in state:
            yield from split_by_turns(name, layer, tensor)
            continue
        parts = ("gate", "up") if name.endswith("gate_up_proj") else ("down",)
        for part, stacked in zip(parts, tensor.chunk(len(parts), dim=1), strict=True):
            yield f"blk.{layer}.ffn_{part}_exps.weight", stacked


def split_by_turns(name: str, layer: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """gpt-oss's gates and values take turns, and inputs come first."""
    kind = "bias" if name.endswith("_bias") else "weight"
    for index, part in enumerate(("gate", "up") if "gate_up" in name else ("down",)):
        of_part = tensor[..., index::2] if "gate_up" in name else tensor
        yield f"blk.{layer}.ffn_{part}_exps.{kind}", of_part.mT if kind == "weight" else of_part


def tensors_of(model: Any, architecture: str) -> Iterator[tuple[str, Tensor]]:
    """By llama.cpp's names."""
    kind = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names, config = gguf.get_tensor_name_map(kind, 99), model.config
    state = fused(model) if architecture == "phi2" else dict(model.state_dict())
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    yield from split_experts(state)
    heads = {".q_proj": config.num_attention_heads, ".k_proj": config.num_key_value_heads}
    for name, tensor in state.items():
        if "query_key_value" in name:  # llama.cpp's converter puts queries first, then keys
            of_head = torch.unflatten(tensor, 0, (config.num_attention_heads, 3, -1))
            tensor = of_head.transpose(0, 1).flatten(0, 2)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        for part, num_heads in heads.items():
            if ARCHITECTURES[architecture].interleaved and part in name:
                tensor = permuted(tensor, num_heads)
        name += ".weight" if name.endswith("sinks") else ""
        tensor = tensor.squeeze(1) if name.endswith("conv.conv.weight") else tensor
        yield str(names.get_name(name, try_suffixes=(".weight", ".bias"))), tensor
    for each in ("long", "short"):
        if f"{each}_factor" in config.rope_parameters:
            factors = config.rope_parameters[f"{each}_factor"]
            yield f"rope_factors_{each}.weight", torch.tensor(factors)


def written(
    path: Path, model: Any, architecture: str, own: dict[str, Any], experts: Any = None
) -> GgufFile:
    """`experts`: how their matrices are quantized."""
    arrays: dict[str, Array] = {
        name: np.ascontiguousarray(tensor.detach().numpy())
        for name, tensor in tensors_of(model, architecture)
    }
    kinds = {name: experts for name in arrays if experts and name.endswith("exps.weight")}
    write_gguf(path, settings_of(model, architecture, **own), arrays, kinds, architecture)
    return GgufFile(path)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    make, own = CASES[name]
    theirs = make()
    file = written(tmp_path / "model.gguf", theirs, name.split(",")[0], own)
    ids_BT = torch.randint(0, TINY.vocab_size, (2, CONTEXT), generator=torch.Generator())
    with torch.inference_mode():
        ours_BTV, theirs_BTV = read_gguf(file).build()(ids_BT), theirs(ids_BT).logits
    assert theirs_BTV.abs().max() > 0.5
    assert float((ours_BTV - theirs_BTV).abs().max()) < TOLERANCE


def test_experts_in_mxfp4_keep_their_blocks(tmp_path: Path) -> None:
    make, own = CASES["gpt-oss"]
    kind = gguf.GGMLQuantizationType.MXFP4
    file = written(tmp_path / "model.gguf", make(), "gpt-oss", own, kind)
    checkpoint = read_gguf(file)
    assert {checkpoint.quantized[name].kind for name in checkpoint.quantized} == {"mxfp4"}
    gates, ups = (
        gguf.dequantize(file.rows(f"blk.1.ffn_{part}_exps.weight"), kind) for part in ("gate", "up")
    )
    found = checkpoint.weights["decoder.1.feed_forward.up.weight"].numpy()
    assert np.abs(found).max() > 0.1
    np.testing.assert_array_equal(found.reshape(5, 2, 96, 64)[:, 0].reshape(-1, 64), gates)
    np.testing.assert_array_equal(found.reshape(5, 2, 96, 64)[:, 1].reshape(-1, 64), ups)


def test_every_architecture_is_compared() -> None:
    assert {name.split(",")[0] for name in CASES} == set(ARCHITECTURES)


NOMIC_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[unused0]", "▁the", "▁union", "s", "▁of"]


def nomic(path: Path, **changes: Any) -> tuple[Any, GgufFile]:
    """A model of transformers', and its file as llama.cpp's converter writes it."""
    config = transformers.NomicBertConfig(
        vocab_size=len(NOMIC_TOKENS),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=16,
        intermediate_size=96,
        max_position_embeddings=CONTEXT,
        pad_token_id=0,
    )
    model = randomised(transformers.NomicBertModel(config))
    names = {
        "embeddings.word_embeddings": "token_embd",
        "embeddings.token_type_embeddings": "token_types",
        "embeddings.LayerNorm": "token_embd_norm",
        "layers.": "blk.",
        "self_attn.qkv_proj": "attn_qkv",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_attention_layernorm": "attn_output_norm",
        "post_mlp_layernorm": "layer_output_norm",
    }
    arrays: dict[str, Array] = {}
    for name, tensor in fused(model).items():
        for theirs, short in names.items():
            name = name.replace(theirs, short)
        if not name.startswith("pooler"):
            arrays[name] = np.ascontiguousarray(tensor.detach().numpy())
    entries = settings_of(SimpleNamespace(config=_like_llama(config)), "nomic-bert")
    entries = {
        name: value
        for name, value in entries.items()
        if not name.endswith(("head_count_kv", "rms_epsilon", "merges", "ggml.pre"))
    }
    entries |= {
        "nomic-bert.attention.layer_norm_epsilon": 1e-12,
        "nomic-bert.attention.causal": False,
        "nomic-bert.pooling_type": 1,
        "nomic-bert.rope.freq_base": 1000.0,
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": NOMIC_TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 3, 3, *[1] * 5],
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.unknown_token_id": 1,
    }
    write_gguf(path, entries | changes, arrays, {}, "nomic-bert")
    return model, GgufFile(path)


def _like_llama(config: Any) -> Any:
    config.num_key_value_heads = config.num_attention_heads
    return config


def test_nomics_encoder_computes_what_transformers_computes(tmp_path: Path) -> None:
    theirs, file = nomic(tmp_path / "nomic.gguf")
    checkpoint = read_gguf(file)
    ids_BT = torch.randint(1, len(NOMIC_TOKENS), (2, CONTEXT), generator=torch.Generator())
    ours = checkpoint.build()
    assert isinstance(ours, Transformer)
    with torch.inference_mode():
        expected = theirs(ids_BT, attention_mask=torch.ones_like(ids_BT)).last_hidden_state
        found = ours.hidden_states(ids_BT)
    assert expected.std() > 0.3
    assert float((found - expected).abs().max()) < TOLERANCE
    assert (checkpoint.pooling, checkpoint.normalize) == ("mean", True)
    assert (checkpoint.prepend_bos, checkpoint.append_eos) == (True, True)
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.encode("The unions of x") == [5, 6, 7, 8, 1]
    assert checkpoint.tokenizer.decode([5, 6, 7]) == "the unions"


def test_another_pooling_is_refused_by_name(tmp_path: Path) -> None:
    _, file = nomic(tmp_path / "nomic.gguf", **{"nomic-bert.pooling_type": 4})
    with pytest.raises(UnsupportedError, match="pooling_type 4"):
        read_gguf(file)
