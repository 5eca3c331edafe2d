"""Reads a Hugging Face directory: config.json, safetensors, tokenizer.json.

Knows: which architectures there are, the names of tensors in the Llama family, all of GPT-2.
Does not know: the Llama family's settings (model/importers/huggingface_llama.py), files of weights
(model/importers/huggingface_weights.py), text (model/importers/huggingface_text.py), Marian
(model/importers/huggingface_marian.py), BERT (model/importers/huggingface_bert.py).
"""

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.checkpoint.typed_values import TypedValues
from quill.model.errors import CheckpointError, UnsupportedError
from quill.model.importers.huggingface_bert import (
    HEAD_BIAS,
    bert_layout,
    read_bert_config,
    read_masked_bert_config,
    takes_no_part,
)
from quill.model.importers.huggingface_config import layer_norm_config, read_activation, refuse
from quill.model.importers.huggingface_llama import LLAMA_FAMILY
from quill.model.importers.huggingface_marian import (
    BANNED,
    banned_tokens,
    in_our_order,
    marian_layout,
    read_marian_config,
)
from quill.model.importers.huggingface_sentence import read_sentence
from quill.model.importers.huggingface_text import read_json, read_text
from quill.model.importers.huggingface_weights import WeightFiles, open_weights
from quill.model.importers.tensor_layout import (
    Layout,
    LlamaNames,
    Part,
    Track,
    check_source,
    layer_norm,
    linear,
    llama_layout,
    untracked,
)
from quill.model.network.config import ModelConfig

LLAMA_NAMES = LlamaNames(
    embedding="model.embed_tokens",
    final_norm="model.norm",
    projection="lm_head",
    layer="model.layers.{}",
    attention_norm="input_layernorm",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    attention_out="self_attn.o_proj",
    feed_forward_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)

_NAMES = {
    "Olmo2ForCausalLM": LLAMA_NAMES._replace(
        attention_norm="post_attention_layernorm", feed_forward_norm="post_feedforward_layernorm"
    ),
    "Phi3ForCausalLM": LLAMA_NAMES._replace(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
    "MixtralForCausalLM": LLAMA_NAMES._replace(
        router="block_sparse_moe.gate",
        expert="block_sparse_moe.experts.{}",
        expert_parts=("w1", "w3", "w2"),
    ),
}
_NAMES |= dict.fromkeys(
    ("Gemma2ForCausalLM", "Gemma3ForCausalLM"),
    LLAMA_NAMES._replace(
        attention_after="post_attention_layernorm",
        feed_forward_norm="pre_feedforward_layernorm",
        feed_forward_after="post_feedforward_layernorm",
        norm_plus=1.0,
    ),
)
_NAMES |= dict.fromkeys(
    ("Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    LLAMA_NAMES._replace(
        router="mlp.gate",
        balance="mlp.gate.e_score_correction_bias",
        expert="mlp.experts.{}",
        shared_experts="mlp.shared_experts",
    ),
)

# Tables that older versions stored beside the weights; everybody computes them now.
_TABLES = re.compile(
    r"(\.rotary_emb\.inv_freq|h\.\d+\.attn\.(bias|masked_bias)|\.embed_positions\.weight)$"
)
# The one embedding under other names.
_TIED = (
    "lm_head.weight",
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "cls.predictions.decoder.weight",
)


def read_settings(directory: Path) -> TypedValues:
    directory = read_sentence(directory).model or directory
    values = read_json(directory / "config.json")
    if not values:
        raise CheckpointError(f"{directory} has no config.json: it isn't a Hugging Face model")
    return TypedValues(values, str(directory / "config.json"))


def read_config(settings: TypedValues) -> ModelConfig:
    architecture = _architecture(settings)
    if settings.get("quantization_config") is not None:
        raise UnsupportedError(
            "the model's weights are quantized (its config.json has a quantization_config); Quill "
            "reads plain ones, in float32, float16 or bfloat16. Use the model that it was made from"
        )
    return ARCHITECTURES[architecture](settings)


def _architecture(settings: TypedValues) -> str:
    listed = settings.get("architectures")
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    known = [name for name in names if name in ARCHITECTURES]
    if len(names) != 1 or not known:
        raise UnsupportedError(
            f"the model's architecture is {', '.join(names) or 'not named in its config.json'}; "
            f"Quill reads {', '.join(ARCHITECTURES)}"
        )
    return known[0]


def read_huggingface(directory: Path, track: Track = untracked) -> Checkpoint:
    """The whole checkpoint. Without a tokenizer.json it takes token ids only."""
    settings, sentence = read_settings(directory), read_sentence(directory)
    config = read_config(settings)
    provenance = _provenance(directory)
    directory = sentence.model or directory
    text = read_text(directory, settings, config.vocab_size, masked=config.masked_head)
    embeds = config.family == "encoder" or sentence.pooling is not None
    with open_weights(directory) as files:
        layout = _layout(config, files, _architecture(settings))
        weights = _read_weights(files, config, layout, directory, track)
    return Checkpoint(
        config=config,
        weights=weights,
        tokenizer=text.tokenizer,
        special_tokens=text.special_tokens,
        prepend_bos=text.prepend_bos,
        append_eos=text.append_eos and embeds,
        stop_ids=() if config.family == "encoder" else text.stop_ids,
        chat_template=text.chat_template,
        generation=text.generation,
        provenance=provenance,
        pooling=sentence.pooling,
        normalize=sentence.normalize,
    )


def _read_weights(
    files: WeightFiles, config: ModelConfig, layout: Layout, directory: Path, track: Track
) -> dict[str, Tensor]:
    shapes = {name: shape for name, shape in files.shapes.items() if not _TABLES.search(name)}
    for name, original in _copies(config, layout).items():
        if name in shapes and original in shapes:
            _refuse_other_numbers(files, name, original)
            del shapes[name]
    if config.family == "encoder":
        shapes = {name: shape for name, shape in shapes.items() if not takes_no_part(name)}
    check_source(layout, shapes, str(directory))
    weights = {name: _join(files, layout[name]) for name in track(list(layout))}
    if config.family != "seq2seq":
        return weights
    weights = {name: in_our_order(name, tensor) for name, tensor in weights.items()}
    generation = read_json(directory / "generation_config.json")
    for token in banned_tokens(generation, config.vocab_size):
        weights["output_bias"][token] = BANNED
    return weights


def _copies(config: ModelConfig, layout: Layout) -> dict[str, str]:
    """Tensors that are others under another name, and those."""
    if not config.tied_embeddings:
        return {}
    copies = dict.fromkeys(_TIED, layout["embedding.weight"][0].name)
    return copies | ({HEAD_BIAS: layout["output_bias"][0].name} if config.masked_head else {})


def _refuse_other_numbers(files: WeightFiles, name: str, original: str) -> None:
    if not files.same(name, original):
        raise UnsupportedError(
            f"{files.directory} has a {name} with other numbers than {original}, but its "
            "config.json says that they are the same (tie_word_embeddings). Set that to false if "
            "both count, or remove the former"
        )


def _join(files: WeightFiles, parts: list[Part]) -> Tensor:
    tensors = [_prepared(files.read(part.name), part) for part in parts]
    return (tensors[0] if len(tensors) == 1 else torch.cat(tensors)).contiguous()


def _prepared(tensor: Tensor, part: Part) -> Tensor:
    if part.transposed:
        return tensor.T
    if part.interleaved_heads:
        heads = torch.unflatten(tensor, 0, (part.interleaved_heads, -1))
        nope, rope = heads[:, : -part.interleaved_rows], heads[:, -part.interleaved_rows :]
        return torch.cat((nope, rope[:, 0::2], rope[:, 1::2]), dim=1).flatten(0, 1)
    return tensor + part.plus if part.plus else tensor


def _layout(config: ModelConfig, files: WeightFiles, architecture: str) -> Layout:
    num_layers = config.num_layers + config.num_encoder_layers
    if num_layers > len(files.shapes):
        raise CheckpointError(
            f"{files.directory} claims {num_layers} layers but has {len(files.shapes)} tensors"
        )
    if config.family == "seq2seq":
        return marian_layout(config)
    if config.family == "encoder":
        return bert_layout(config, files.shapes)
    if config.positions == "rotary":
        return llama_layout(config, _NAMES.get(architecture, LLAMA_NAMES), interleaved=False)
    # GPT-2's own checkpoint was saved without its head, and so without this prefix.
    prefix = "transformer." if "transformer.wte.weight" in files.shapes else ""
    return _gpt2_layout(config, prefix)


def _gpt2_config(settings: TypedValues) -> ModelConfig:
    refuse(
        settings,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    )
    d_model = settings.integer("n_embd")
    return layer_norm_config(
        d_model,
        settings.integer("n_head"),
        family="causal",
        vocab_size=settings.integer("vocab_size"),
        context=settings.integer("n_positions"),
        num_layers=settings.integer("n_layer"),
        d_ff=settings.integer("n_inner", 4 * d_model),
        positions="learned",
        activation=read_activation(settings, "activation_function", "gelu_new"),
        tied_embeddings=settings.flag("tie_word_embeddings", True),
        norm_eps=settings.number("layer_norm_epsilon", 1e-5),
    )


def _gpt2_layout(config: ModelConfig, prefix: str) -> Layout:
    d_model, d_ff = config.d_model, config.d_ff
    vocabulary = (config.vocab_size, d_model)
    layout = {
        "embedding.weight": [Part(f"{prefix}wte.weight", vocabulary)],
        "position_embedding.weight": [Part(f"{prefix}wpe.weight", (config.context, d_model))],
        **layer_norm("decoder_norm", f"{prefix}ln_f", d_model),
    }
    for index in range(config.num_layers):
        ours, theirs = f"decoder.{index}", f"{prefix}h.{index}"
        layout |= layer_norm(f"{ours}.attention_residual.norm", f"{theirs}.ln_1", d_model)
        layout |= layer_norm(f"{ours}.feed_forward_residual.norm", f"{theirs}.ln_2", d_model)
        for name, source, shape in (
            ("attention.qkv", "attn.c_attn", (3 * d_model, d_model)),
            ("attention.out", "attn.c_proj", (d_model, d_model)),
            ("feed_forward.up", "mlp.c_fc", (d_ff, d_model)),
            ("feed_forward.down", "mlp.c_proj", (d_model, d_ff)),
        ):
            layout |= linear(f"{ours}.{name}", [f"{theirs}.{source}"], shape, transposed=True)
    if not config.tied_embeddings:
        layout["projection.weight"] = [Part("lm_head.weight", vocabulary)]
    return layout


ARCHITECTURES: dict[str, Callable[[TypedValues], ModelConfig]] = {
    **LLAMA_FAMILY,
    "GPT2LMHeadModel": _gpt2_config,
    "MarianMTModel": read_marian_config,
    "BertModel": read_bert_config,
    "BertForMaskedLM": read_masked_bert_config,
    "BertForPreTraining": read_masked_bert_config,
}


def _provenance(directory: Path) -> dict[str, str]:
    """Name and version by the directory: the hub's cache has models--OWNER--NAME/snapshots/HASH."""
    here = directory.resolve()
    licence = _licence(directory / "README.md")
    provenance = {"name": here.name} | ({"licence": licence} if licence else {})
    if here.parent.name == "snapshots":
        name = here.parents[1].name.removeprefix("models--").replace("--", "/")
        provenance |= {"name": name, "version": here.name}
    return provenance


def _licence(readme: Path) -> str | None:
    """The licence that the model card's head names."""
    if not readme.exists():
        return None
    head = readme.read_text(encoding="utf-8", errors="replace")[:4096]
    found = re.match(r"---\n(?:.*\n)*?license: *(\S+) *\n(?:.*\n)*?---\n", head)
    return found[1] if found else None
