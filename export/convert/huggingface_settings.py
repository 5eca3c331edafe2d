"""Finds the architecture of transformers that a network is, and its settings in a config.json.

Knows: config.json's names for what a ModelConfig has. Does not know: what settings mean: the
importers do (model/importers/huggingface_directory.py). Files, tensors.

The importers' readers run backwards: each architecture's reader gets the settings in every
spelling, and the architecture is one whose reader makes this very network of them. What the reader
asked for is what the file has to have.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from quill.export.errors import UnsupportedModelError
from quill.model.checkpoint.typed_values import TypedValues
from quill.model.errors import ModelError
from quill.model.importers.huggingface_config import CONV, FULL, SLIDING
from quill.model.importers.huggingface_directory import ARCHITECTURES
from quill.model.network.config import Experts, Latent, ModelConfig, RotaryScaling

ROBERTA_PADDING = 1  # positions are counted from behind it on
_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh", "gelu_tanh": "gelu_new"}
_SUFFIXES = ("ForCausalLM", "ForMaskedLM", "ForPreTraining", "LMHeadModel", "MTModel", "Model")
# The others' types are their names in lower case.
_MODEL_TYPES = {
    "Gemma3": "gemma3_text",
    "GPTNeoX": "gpt_neox",
    "GptOss": "gpt_oss",
    "Qwen2Moe": "qwen2_moe",
    "Qwen3Moe": "qwen3_moe",
    "DeepseekV2": "deepseek_v2",
    "DeepseekV3": "deepseek_v3",
    "XLMRoberta": "xlm-roberta",
}
# Those that turn a part of a head; the others turn all of it, whatever the file has.
_PARTIAL_ROTARY = {"GPTNeoX", "Phi", "Phi3", "StableLm"}


# Those that Quill imports and can't write: the network has fewer rows of positions than BART's
# files, and other spellings of a bias by distance and of classes aren't known here. Nomic's encoder
# is read out of GGUF alone.
ONE_WAY = frozenset(
    name
    for name in (*ARCHITECTURES, "NomicBertModel")
    if name.startswith(("Bart", "T5", "MT5", "MPNet", "Nomic")) or name.endswith("Classification")
)


class Found(NamedTuple):
    """An architecture that computes what the network computes."""

    architecture: str
    config: ModelConfig  # with biases of zero where the architecture has more than the network
    spelling: dict[str, Any]  # every setting that an architecture may have
    settings: dict[str, Any]  # those that this one has


class _Recorded(dict[str, Any]):
    """Settings that know which of them were asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)


def find_architecture(config: ModelConfig, preferred: str | None = None) -> Found:
    """`preferred`: the source's own, where several compute the same."""
    check_writable(config, preferred)
    for found in find_architectures(config, preferred):
        return found
    raise UnsupportedModelError(
        f"no architecture of transformers that Quill writes computes this {described(config)}. "
        f"{_nearest(config)}{instead(config)}"
    )


def check_writable(config: ModelConfig, preferred: str | None) -> None:
    if preferred in ONE_WAY:
        raise UnsupportedModelError(
            f"Quill imports {preferred}, and can write it with --to onnx only. Or serve it with "
            "Quill: quill serve SOURCE"
        )


def instead(config: ModelConfig) -> str:
    """What can be done with a network that a format doesn't have."""
    targets = ["transformers"] if any(True for _ in find_architectures(config)) else []
    targets += ["onnx"] if config.recurrence is None else []
    convert = f"Convert it with --to {' or '.join(targets)}, or serve" if targets else "Serve"
    return f"{convert} it with Quill: quill serve SOURCE"


def find_architectures(config: ModelConfig, preferred: str | None = None) -> Iterator[Found]:
    for wanted in (config, *_with_biases(config)):
        known = [name for name in ARCHITECTURES if name not in ONE_WAY]
        for name in sorted(known, key=lambda name: name != preferred):
            if (found := _found(name, wanted)) is not None:
                yield found


def _with_biases(config: ModelConfig) -> Iterator[ModelConfig]:
    """A bias of zero changes nothing."""
    if (config.recurrence, config.experts, config.latent, config.norm) == (*[None] * 3, "layer"):
        completed = replace(
            config,
            qkv_bias=True,
            attention_out_bias=True,
            ff_bias=True,
            output_bias=config.output_bias or config.family == "seq2seq",
        )
        yield from () if completed == config else (completed,)


def _found(architecture: str, config: ModelConfig) -> Found | None:
    """None: the architecture doesn't compute this."""
    if config.partial_rotary_size and _short(architecture) not in _PARTIAL_ROTARY:
        return None
    for spelling in _spellings(config):
        recorded = _Recorded(spelling)
        try:
            read = ARCHITECTURES[architecture](TypedValues(recorded, "the settings"))
        except ModelError:
            continue
        if not different(read, config):
            asked = {name: value for name, value in spelling.items() if name in recorded.asked}
            named = {"architectures": [architecture], "model_type": model_type(architecture)}
            return Found(architecture, config, spelling, named | asked)
    return None


def different(one: ModelConfig, other: ModelConfig) -> list[str]:
    """The names of settings that differ. Floats may, in their last digits, and so may dropout: it
    is for training only."""
    mine, theirs = asdict(one), asdict(replace(other, dropout=one.dropout))
    return [name for name in mine if not _close(mine[name], theirs[name])]


def _close(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_close(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)


def model_type(architecture: str) -> str:
    return _MODEL_TYPES.get(_short(architecture), _short(architecture).lower())


def _short(architecture: str) -> str:
    """Without its head."""
    return architecture.removesuffix(next(filter(architecture.endswith, _SUFFIXES), ""))


def described(config: ModelConfig) -> str:
    if config.recurrence is not None:
        return f"recurrent network ({config.recurrence.cell}, {config.recurrence.context})"
    parts = [f"{config.positions} positions", f"{config.norm} norms ({config.norm_placement})"]
    parts += [config.activation]
    parts += ["experts"] if config.experts is not None else []
    parts += ["latent attention"] if config.latent is not None else []
    return f"{config.family} network ({', '.join(parts)})"


def _nearest(config: ModelConfig) -> str:
    """A sentence about the architecture with the fewest differences."""
    if config.recurrence is not None:
        return ""
    differences: list[tuple[list[str], str]] = []
    for name, read in ARCHITECTURES.items():
        for spelling in _spellings(config):
            try:
                found = read(TypedValues(spelling, "the settings"))
            except ModelError:
                continue
            if found.family == config.family:
                differences.append((different(found, config), name))
    if not differences:
        return ""
    names, nearest = min(differences, key=lambda each: len(each[0]))
    return f"The nearest, {nearest}, has another {', '.join(names)}. "


def _spellings(config: ModelConfig) -> Iterator[dict[str, Any]]:
    """The same settings where architectures mean different things by one name."""
    settings = _sizes(config) | _numbers(config) | _windows(config)
    if config.experts is not None:
        settings |= _experts(config.experts)
    if config.latent is not None:
        settings |= _latent(config.latent)
    rotary = _rotary(config)
    name = "original_max_position_embeddings"  # Phi-3 has it beside them, and there it counts
    settings |= {name: rotary[name]} if name in rotary else {}
    local_base = config.local_rotary_base or config.rotary_base
    local = {"rope_type": "default", "rope_theta": local_base}
    settings |= {"rope_theta": config.rotary_base, "rope_local_base_freq": local_base}
    all_full = {"layer_types": [FULL] * config.num_layers}
    yield settings | {"rope_parameters": rotary}
    yield settings | {"rope_parameters": {FULL: rotary, SLIDING: local}}
    yield settings | {"rope_parameters": {FULL: rotary, SLIDING: local}} | all_full
    yield settings | {"rope_parameters": rotary} | all_full
    # Positions of RoBERTa's begin behind the padding's.
    positions = config.context + ROBERTA_PADDING + 1
    yield settings | {"max_position_embeddings": positions, "pad_token_id": ROBERTA_PADDING}


def _sizes(config: ModelConfig) -> dict[str, Any]:
    """In the spellings of Llama and BERT, GPT-2, DistilBERT, Marian."""
    num_layers = config.num_layers or config.num_encoder_layers
    sizes: dict[str, Any] = {"vocab_size": config.vocab_size, "num_hidden_layers": num_layers}
    sizes |= dict.fromkeys(("max_position_embeddings", "n_positions"), config.context)
    sizes |= dict.fromkeys(("hidden_size", "n_embd", "dim", "d_model"), config.d_model)
    sizes |= dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), config.num_heads)
    sizes |= dict.fromkeys(("intermediate_size", "n_inner", "hidden_dim"), config.d_ff)
    sizes |= dict.fromkeys(("n_layer", "n_layers"), num_layers)
    sizes |= {
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size if config.latent is None else config.latent.rope_size,
        "type_vocab_size": config.num_segments or None,
        "encoder_layers": config.num_encoder_layers,
        "decoder_layers": config.num_layers,
        "block_auto_adjust_ff_dim": False,
    }
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_attention_heads": config.num_heads, f"{side}_ffn_dim": config.d_ff}
    return sizes


def _numbers(config: ModelConfig) -> dict[str, Any]:
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
    activation = _ACTIVATIONS.get(config.activation, config.activation)
    acts = ("hidden_act", "hidden_activation", "activation_function", "activation")
    scalar = round(config.scale**-2, 6)
    return {
        **dict.fromkeys(names, config.norm_eps),
        **dict.fromkeys(acts, activation),
        "attention_bias": config.attention_out_bias,
        "qkv_bias": config.qkv_bias,
        "use_qkv_bias": config.qkv_bias,
        "mlp_bias": config.ff_bias,
        "tie_word_embeddings": config.tied_embeddings,
        "scale_embedding": config.scale_embeddings,
        "use_parallel_residual": config.parallel_residual,
        "no_rope_layer_interval": config.nope_pattern or config.num_layers + 1,
        "no_rope_layers": [int(config.is_rotary(layer)) for layer in range(config.num_layers)],
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "attn_logit_softcapping": config.attention_soft_cap or None,
        "final_logit_softcapping": config.logit_soft_cap or None,
        "attention_multiplier": config.scale,
        "embedding_multiplier": config.embedding_scale or 1.0,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": 1.0,  # it is in the last norm
    }


def _windows(config: ModelConfig) -> dict[str, Any]:
    if config.short_conv is not None:
        return {
            "layer_types": [CONV if config.is_conv(i) else FULL for i in range(config.num_layers)],
            "conv_L_cache": config.short_conv.taps,
            "conv_bias": config.short_conv.bias,
        }
    if not config.window:
        return {"sliding_window": None}
    kinds = [SLIDING if config.window_of(i) else FULL for i in range(config.num_layers)]
    return {
        "sliding_window": config.window,
        "use_sliding_window": True,
        "layer_types": kinds,
        "sliding_window_pattern": config.window_pattern or config.num_layers + 1,
    }


def _experts(experts: Experts) -> dict[str, Any]:
    settings: dict[str, Any] = dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts"), experts.number
    )
    if experts.scoring == "softmax":
        settings["topk_method"] = "group_limited_greedy" if experts.groups > 1 else "greedy"
    return settings | {
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.d_expert,
        "norm_topk_prob": experts.normalize,
        "mlp_only_layers": list(range(experts.dense_layers)),
        "first_k_dense_replace": experts.dense_layers,
        "n_shared_experts": experts.num_shared,
        "shared_expert_intermediate_size": experts.num_shared * experts.d_expert,
        "routed_scaling_factor": experts.scale,
        "swiglu_limit": experts.clamp,
        "swiglu_alpha": experts.slope,
        "n_group": experts.groups,
        "topk_group": experts.top_groups,
    }


def _latent(latent: Latent) -> dict[str, Any]:
    return {
        "kv_lora_rank": latent.rank,
        "q_lora_rank": latent.query_rank or None,
        "qk_rope_head_dim": latent.rope_size,
        "qk_nope_head_dim": latent.nope_size,
        "v_head_dim": latent.value_size,
    }


def _rotary(config: ModelConfig) -> dict[str, Any]:
    rotary: dict[str, Any] = {"rope_theta": config.rotary_base, "rope_type": "default"}
    if config.partial_rotary_size or config.norm == "layer":
        rotary["partial_rotary_factor"] = config.rotary_size / config.head_size
    if config.rotary_scaling is None:
        return rotary
    return rotary | _scaling(config, config.rotary_scaling)


def _scaling(config: ModelConfig, scaling: RotaryScaling) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return values
    values["original_max_position_embeddings"] = scaling.original_context
    if scaling.kind == "llama3":
        names = ("low_freq_factor", "high_freq_factor")
        return values | {name: getattr(scaling, name) for name in names}
    values["attention_factor"] = scaling.attention_factor
    if scaling.kind == "longrope":
        # Quill has one of the two for texts of all lengths.
        return values | {f"{each}_factor": [*scaling.divisors] for each in ("long", "short")}
    if not scaling.truncate:
        values["truncate"] = False
    values |= {"beta_slow": scaling.low_freq_factor, "beta_fast": scaling.high_freq_factor}
    if config.latent is not None and config.attention_scale is not None:
        raised = math.sqrt(config.attention_scale * math.sqrt(config.head_size))
        values["mscale_all_dim"] = round((raised - 1) / (0.1 * math.log(scaling.factor)), 6)
    return values
