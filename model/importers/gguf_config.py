"""Reads the shape of a decoder, or of Nomic's encoder, out of a GGUF file.

Knows: llama.cpp's names for architectures, settings and tensors. A row of ARCHITECTURES says whose
settings in a Hugging Face config.json a file's are; model/importers/huggingface_llama.py knows what
they mean. Does not know: the container, tokenizers, block formats.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from quill.model.checkpoint.typed_values import TypedValues
from quill.model.errors import CheckpointError, UnsupportedError
from quill.model.importers.gguf_file import GgufFile
from quill.model.importers.gguf_tensors import Source, decode
from quill.model.importers.huggingface_config import CONV, FULL, SLIDING
from quill.model.importers.huggingface_decoders import DECODERS
from quill.model.importers.tensor_layout import LlamaNames
from quill.model.network.config import ModelConfig, RotaryScaling
from quill.model.network.positions import rotary_frequencies

NAMES = LlamaNames(
    embedding="token_embd",
    final_norm="output_norm",
    projection="output",
    layer="blk.{}",
    attention_norm="attn_norm",
    query="attn_q",
    key="attn_k",
    value="attn_v",
    attention_out="attn_output",
    feed_forward_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
    query_norm="attn_q_norm",
    key_norm="attn_k_norm",
    router="ffn_gate_inp",
    stacked_experts=("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
    sinks="attn_sinks.weight",
)
_GEMMA_NAMES = NAMES._replace(
    attention_after="post_attention_norm", feed_forward_after="post_ffw_norm"
)
NOMIC = "nomic-bert"
ROTARY_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"

# llama.cpp's names for settings, and config.json's. All files have the former ones.
NEEDED = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "rope.freq_base": "rope_theta",
}
_SPEEDS = ("fast", "slow")
_WINDOW = {"attention.sliding_window": "sliding_window"}
_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
# Understood here, or said by old converters about themselves.
_READ_HERE = {
    *("vocab_size", "attention.key_length", "attention.value_length", "rope.dimension_count"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "tensor_data_layout"),
    *("rope.scaling.original_context_length", "rope.scaling.finetuned"),
    *("rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    "attention.causal",
}


class Architecture(NamedTuple):
    """What the files of one architecture have, and whose settings theirs are."""

    huggingface: str
    names: LlamaNames = NAMES
    interleaved: bool = False  # rows of queries and keys are in the order of interleaved rotation
    settings: Mapping[str, str] = {}  # those that aren't in all files
    fixed: Mapping[str, object] = {}  # what config.json sets and files don't
    by_kind: bool = False  # layers with a window have rotary positions that nothing stretches
    local_rotary_base: float | None = None  # of these; None: that of the others
    narrow_scale_layers: int = 0  # with so many layers scores are scaled by d_model / num_heads
    eps: str = "attention.layer_norm_rms_epsilon"
    has: Mapping[str, str] = {}  # tensors whose presence is a setting
    rotary: Mapping[str, object] = {}  # of rotary positions, what config.json sets and files don't


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", interleaved=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", settings=_EXPERTS, fixed={"norm_topk_prob": True}
    ),
    "olmo2": Architecture(
        "Olmo2ForCausalLM",
        NAMES._replace(attention_norm="post_attention_norm", feed_forward_norm="post_ffw_norm"),
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM", NAMES._replace(qkv="attn_qkv", gate_up="ffn_up"), settings=_WINDOW
    ),
    "phi2": Architecture(
        "PhiForCausalLM",
        NAMES._replace(qkv="attn_qkv", feed_forward_norm="attn_norm"),
        eps="attention.layer_norm_epsilon",
    ),
    "stablelm": Architecture(
        "StableLmForCausalLM",
        settings={"use_parallel_residual": "use_parallel_residual"},
        eps="attention.layer_norm_epsilon",
        has={"blk.0.attn_q.bias": "use_qkv_bias", "blk.0.attn_q_norm.weight": "qk_layernorm"},
    ),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        NAMES._replace(qkv="attn_qkv"),
        settings={"use_parallel_residual": "use_parallel_residual"},
        eps="attention.layer_norm_epsilon",
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", interleaved=True),
    "granite": Architecture(
        "GraniteForCausalLM",
        interleaved=True,
        settings={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        NAMES._replace(feed_forward_norm="post_attention_norm"),
        settings=_WINDOW | _EXPERTS | {"expert_count": "num_local_experts"},
        rotary={"truncate": False},
    ),
    "lfm2": Architecture(
        "Lfm2ForCausalLM",
        NAMES._replace(
            final_norm="token_embd_norm",
            conv="shortconv.conv",
            conv_in="shortconv.in_proj",
            conv_out="shortconv.out_proj",
        ),
        settings={
            "attention.layer_norm_rms_epsilon": "norm_eps",
            "shortconv.l_cache": "conv_L_cache",
        },
        fixed={"block_auto_adjust_ff_dim": False},
    ),
    "gemma": Architecture("GemmaForCausalLM"),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", _GEMMA_NAMES, settings=_WINDOW | _CAPS, narrow_scale_layers=46
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        _GEMMA_NAMES,
        settings={
            **_WINDOW,
            "attention.sliding_window_pattern": "sliding_window_pattern",
            "final_logit_softcapping": "final_logit_softcapping",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        by_kind=True,
        local_rotary_base=10_000.0,
        narrow_scale_layers=62,
    ),
}

MIXTRAL = ARCHITECTURES["llama"]._replace(
    huggingface="MixtralForCausalLM", settings={**_EXPERTS, "expert_count": "num_local_experts"}
)

OLMO3 = ARCHITECTURES["olmo2"]._replace(
    huggingface="Olmo3ForCausalLM", settings=_WINDOW, by_kind=True
)


def architecture_of(file: GgufFile) -> Architecture:
    name = file.metadata.text("general.architecture")
    if name == "llama" and file.metadata.get("llama.expert_count"):
        return MIXTRAL
    if name == "olmo2" and file.metadata.get("olmo2.attention.sliding_window"):
        return OLMO3
    if name not in ARCHITECTURES:
        raise UnsupportedError(
            f"the GGUF file has the architecture {name!r}; Quill reads "
            f"{', '.join((*ARCHITECTURES, NOMIC))}"
        )
    return ARCHITECTURES[name]


def read_config(file: GgufFile) -> ModelConfig:
    if file.metadata.text("general.architecture") == NOMIC:
        return _nomic_config(file.metadata)
    architecture = architecture_of(file)
    if file.metadata.integer("split.count", 1) > 1:
        raise UnsupportedError(
            "the GGUF file is one part of several; join them with `llama-gguf-split --merge`"
        )
    return DECODERS[architecture.huggingface](read_settings(file, architecture))


def _nomic_config(metadata: TypedValues) -> ModelConfig:
    """BERT with rotary positions and SwiGLU, and without biases but for its norms."""
    prefix = f"{NOMIC}."
    understood = {*NEEDED, "attention.layer_norm_epsilon", "rope.freq_base", "pooling_type"}
    _check_names(metadata, prefix, understood)
    sizes = {name: metadata.integer(prefix + theirs) for theirs, name in NEEDED.items()}
    num_heads = sizes["num_attention_heads"]
    return ModelConfig(
        family="encoder",
        vocab_size=len(metadata.texts("tokenizer.ggml.tokens")),
        context=sizes["max_position_embeddings"],
        d_model=sizes["hidden_size"],
        num_layers=0,
        num_encoder_layers=sizes["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=sizes["hidden_size"] // max(num_heads, 1),
        d_ff=sizes["intermediate_size"],
        positions="rotary",
        norm="layer",
        norm_placement="post",
        activation="swiglu",
        norm_eps=_plain(metadata.number(prefix + "attention.layer_norm_epsilon")),
        rotary_base=_plain(metadata.number(prefix + "rope.freq_base")),
        num_segments=metadata.integer("tokenizer.ggml.token_type_count"),
        embedding_norm=True,
    )


def read_settings(file: GgufFile, architecture: Architecture) -> TypedValues:
    """The file's settings under the names that config.json has for them."""
    metadata, prefix = file.metadata, file.metadata.text("general.architecture") + "."
    _check_names(metadata, prefix, {*NEEDED, *OPTIONAL, *_READ_HERE, *architecture.settings})
    if not metadata.flag(prefix + "attention.causal", True):
        raise UnsupportedError(
            f"the GGUF file has {prefix}attention.causal false: its tokens see those behind them, "
            "and Quill's decoders don't"
        )
    values: dict[str, Any] = {**architecture.fixed, "tie_word_embeddings": _is_tied(file)}
    values |= {name: True for tensor, name in architecture.has.items() if tensor in file.tensors}
    values |= {name: metadata.integer(prefix + theirs) for theirs, name in NEEDED.items()}
    for theirs, name in (OPTIONAL | dict(architecture.settings)).items():
        value = metadata.get(prefix + theirs)
        if value is not None:
            values[name] = _plain(value) if isinstance(value, float) else value
    values |= _by_layer(values, prefix)
    metadata.number(prefix + architecture.eps)  # no default is everybody's
    num_layers, num_heads = values["num_hidden_layers"], max(values["num_attention_heads"], 1)
    if num_layers > len(file.tensors):
        raise CheckpointError(
            f"{file.path} claims {num_layers} layers but has {len(file.tensors)} tensors"
        )
    width = values["hidden_size"] // num_heads
    head_size = metadata.integer(prefix + "attention.key_length", width)
    _check_head_size(metadata, prefix, head_size, architecture)
    embedding = file.tensors.get(f"{NAMES.embedding}.weight")
    narrow = num_layers == architecture.narrow_scale_layers
    values |= {
        "vocab_size": embedding.shape[0] if embedding else metadata.integer(prefix + "vocab_size"),
        "head_dim": head_size,
        "query_pre_attn_scalar": width if narrow else head_size,
    }
    return TypedValues(values | _rotary(file, prefix, values, architecture), str(file.path))


def _by_layer(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """K/V heads of each layer; a layer without any has a short convolution."""
    heads = values.get("num_key_value_heads")
    if not isinstance(heads, list):
        return {}
    if len({*heads} - {0}) != 1:
        raise UnsupportedError(
            f"the GGUF file sets {prefix}attention.head_count_kv to {heads}; Quill knows one "
            "number for all layers with attention, and 0 for others"
        )
    kinds = [FULL if each else CONV for each in heads]
    return {"num_key_value_heads": max(heads), "layer_types": kinds}


def _check_names(metadata: TypedValues, prefix: str, understood: set[str]) -> None:
    for name in metadata.names:
        setting = name.removeprefix(prefix)
        # Nought, false and empty switch a feature off: several writers spell that out.
        if name != setting and setting not in understood and metadata.get(name):
            raise UnsupportedError(
                f"the GGUF file sets {name} to {metadata.get(name)!r}; Quill doesn't know what it "
                "changes, so it can't compute what this model computes"
            )


def _check_head_size(
    metadata: TypedValues, prefix: str, head_size: int, architecture: Architecture
) -> None:
    names = ["attention.value_length"]
    names += ["rope.dimension_count"] if architecture.interleaved else []
    for name in names:
        size = metadata.integer(prefix + name, head_size)
        if size != head_size:
            raise UnsupportedError(
                f"the GGUF file has {prefix}{name} {size} with heads of {head_size}; Quill needs "
                "both to be the same"
            )


def _is_tied(file: GgufFile) -> bool:
    """The output matrix is left out, or is the embedding once more."""
    output = file.tensors.get(f"{NAMES.projection}.weight")
    embedding = file.tensors.get(f"{NAMES.embedding}.weight")
    if output is None or embedding is None:
        return True
    if (output.kind, output.shape) != (embedding.kind, embedding.shape):
        return False
    return np.array_equal(file.rows(output.name), file.rows(embedding.name))


def _plain(value: float) -> float:
    """The decimal that was meant: a float32 of 1e-5 reads as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rotary(
    file: GgufFile, prefix: str, values: Mapping[str, Any], architecture: Architecture
) -> dict[str, Any]:
    """`rope_parameters`, for each kind of layer where they differ."""
    base, head_size = values.get("rope_theta", 10_000.0), values["head_dim"]
    turned = file.metadata.integer(prefix + "rope.dimension_count", head_size)
    parameters = {
        "rope_theta": base,
        "partial_rotary_factor": turned / max(head_size, 1),
        **_rotary_scaling(file, prefix, turned, base),
        **architecture.rotary,
    }
    if not architecture.by_kind:
        return {"rope_parameters": parameters}
    local = values.get("rope_local_base_freq", architecture.local_rotary_base or base)
    return {"rope_parameters": {FULL: parameters, SLIDING: {"rope_theta": local}}}


def _rotary_scaling(file: GgufFile, prefix: str, head_size: int, base: float) -> dict[str, Any]:
    metadata = file.metadata
    # As in llama.cpp: a factor without a type stretches, and with the type none it doesn't.
    kind = metadata.text(prefix + "rope.scaling.type", "linear")
    old_factor = metadata.number(prefix + "rope.scale_linear", 1.0)
    factor = metadata.number(prefix + "rope.scaling.factor", old_factor) or 1.0
    original = {
        "original_max_position_embeddings": metadata.integer(
            prefix + "rope.scaling.original_context_length",
            metadata.integer(prefix + "context_length"),
        )
    }
    tables = [name for name in (LONG_FACTORS, ROTARY_FACTORS) if name in file.tensors]
    if tables and factor != 1.0 and kind != "none":
        raise UnsupportedError(
            f"the GGUF file stretches rotary positions by {tables[0]} and by the factor "
            f"{factor:g}; Quill knows one of them only"
        )
    if LONG_FACTORS in file.tensors:
        names = {"long_factor": LONG_FACTORS, "short_factor": SHORT_FACTORS}
        longrope: dict[str, Any] = {name: _numbers(file, each) for name, each in names.items()}
        given = metadata.get(prefix + "rope.scaling.attn_factor")
        return {"rope_type": "longrope", **original, **longrope} | (
            {"attention_factor": _plain(given)} if isinstance(given, float) else {}
        )
    if kind == "yarn":
        betas = {f"beta_{x}": metadata.get(f"{prefix}rope.scaling.yarn_beta_{x}") for x in _SPEEDS}
        if metadata.get(prefix + "rope.scaling.attn_factor") not in (None, 1.0):
            raise UnsupportedError(f"the GGUF file sets {prefix}rope.scaling.attn_factor with yarn")
        return {"rope_type": "yarn", "factor": factor, **original, **betas}
    if kind not in ("none", "linear"):
        raise UnsupportedError(
            f"the GGUF file stretches rotary positions by {kind!r}; Quill knows 'linear', 'yarn', "
            "'longrope' and Llama 3's"
        )
    if ROTARY_FACTORS in file.tensors:
        return _llama3_scaling(file, head_size, base)
    return {} if kind == "none" or factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _numbers(file: GgufFile, name: str) -> list[float]:
    if name not in file.tensors:
        raise CheckpointError(f"{file.path} lacks {name}")
    values = decode(Source(file.rows(name), file.tensors[name].kind, name))
    return [float(value) for value in values.flatten()]


def _llama3_scaling(file: GgufFile, head_size: int, rotary_base: float) -> dict[str, Any]:
    """The file has a divisor for each frequency; it must be the one that Llama 3's rule gives."""
    factors_F = torch.tensor(_numbers(file, ROTARY_FACTORS))
    largest = float(factors_F.max())
    scaling = RotaryScaling(kind="llama3", factor=_plain(largest))
    plain_F = rotary_frequencies(head_size, rotary_base, None)
    expected_F = plain_F / rotary_frequencies(head_size, rotary_base, scaling)
    if factors_F.shape != expected_F.shape or not torch.allclose(factors_F, expected_F, rtol=1e-4):
        raise UnsupportedError(
            f"{ROTARY_FACTORS} of {file.path} isn't what Llama 3's rule gives for the factor "
            f"{largest:g}; Quill knows no other"
        )
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context,
    }
