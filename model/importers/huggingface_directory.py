"""Reads a Hugging Face directory: config.json, safetensors, tokenizer.json.

Knows: which architectures there are, how their tensors become ours, all of GPT-2.
Does not know: other decoders (model/importers/huggingface_decoders.py), files of weights
(model/importers/huggingface_weights.py), text (model/importers/huggingface_text.py),
encoder–decoders (model/importers/huggingface_seq2seq.py), encoders
(model/importers/huggingface_bert.py).
"""

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.checkpoint.tensors import Lazy, LazyTensor, Tensors
from quill.model.checkpoint.typed_values import TypedValues
from quill.model.errors import CheckpointError, UnsupportedError
from quill.model.importers.huggingface_bert import ENCODERS, bert_layout, bert_names, takes_no_part
from quill.model.importers.huggingface_config import layer_norm_config, read_activation, refuse
from quill.model.importers.huggingface_decoders import DECODERS, decoder_names
from quill.model.importers.huggingface_seq2seq import (
    BANNED,
    SEQ2SEQ,
    as_saved,
    banned_tokens,
    in_our_order,
    seq2seq_layout,
)
from quill.model.importers.huggingface_text import read_json, read_sentence, read_text
from quill.model.importers.huggingface_weights import (
    mxfp4_names,
    open_weights,
    read_mxfp4,
    same_numbers,
    with_values,
)
from quill.model.importers.tensor_layout import (
    Layout,
    Part,
    check_finite,
    check_source,
    layer_norm,
    linear,
    llama_layout,
)
from quill.model.network.config import ModelConfig

ADAPTER = "adapter_config.json"  # PEFT's; transformers applies it by itself
# Tables that older versions stored beside the weights; everybody computes them now.
_TABLES = re.compile(
    r"(\.rotary_emb\.inv_freq|h\.\d+\.attn\.(bias|masked_bias)|\.embed_positions\.weight"
    r"|EncDecAttention\.relative_attention_bias\.weight)$"
)
# The one embedding under other names: of an encoder–decoder's sides, and of the projection.
_SHARED = [f"{each}coder.embed_tokens.weight" for each in ("model.en", "model.de", "en", "de")]
_TIED = (
    "lm_head.weight",
    *(f"{bert_names(name).projection}.weight" for name in ENCODERS),
)


def read_settings(directory: Path) -> TypedValues:
    directory = read_sentence(directory).model or directory
    if (directory / ADAPTER).exists():
        raise UnsupportedError(
            f"{directory} has an adapter ({ADAPTER}), without which the model computes something "
            "else. Merge it into the weights (PEFT's merge_and_unload), or remove the file"
        )
    values = read_json(directory / "config.json")
    if not values:
        kind = "an empty" if (directory / "config.json").exists() else "no"
        raise CheckpointError(f"{directory} has {kind} config.json: it isn't a Hugging Face model")
    return TypedValues(values, str(directory / "config.json"))


def read_config(settings: TypedValues) -> ModelConfig:
    architecture = _architecture(settings)
    _check_quantization(architecture, settings)
    return ARCHITECTURES[architecture](settings)


def _check_quantization(architecture: str, settings: TypedValues) -> None:
    if settings.get("quantization_config") is None:
        return
    method = settings.mapping("quantization_config").get("quant_method")
    if (architecture, method) != ("GptOssForCausalLM", "mxfp4"):
        raise UnsupportedError(
            f"the model's weights are quantized (its config.json has a quantization_config, of "
            f"{method}); Quill reads plain ones, in float32, float16 or bfloat16, and gpt-oss's "
            "mxfp4. Use the model that it was made from"
        )


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


def read_huggingface(directory: Path) -> Checkpoint:
    """The checkpoint; its weights are read when they are asked for, in the source's own types.
    Without a tokenizer.json it takes token ids only."""
    settings, sentence = read_settings(directory), read_sentence(directory)
    config = read_config(settings)
    provenance = _provenance(directory)
    directory = sentence.model or directory
    source = open_weights(directory)
    if config.family == "seq2seq":
        config = as_saved(config, source)
    if sentence.pooling is not None and config.masked_head:
        config = _without_absent_head(config, settings, source)
    embeds = config.family == "encoder" or sentence.pooling is not None
    text = read_text(
        directory, settings, config.vocab_size, masked=config.masked_head, embeds=embeds
    )
    kept, tensors = mxfp4_names(source), with_values(source)
    layout = _layout(config, tensors, settings, str(directory))
    weights = _weights(tensors, config, layout, directory)
    if sentence.max_tokens is not None and sentence.max_tokens < config.context:
        config = replace(config, context=sentence.max_tokens)
        weights = _shortened(weights, config)
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
        quantized=Lazy(
            {
                name: partial(read_mxfp4, source, parts[0])
                for name, parts in layout.items()
                if parts[0].name in kept
            }
        ),
    )


def _without_absent_head(
    config: ModelConfig, settings: TypedValues, source: Collection[str]
) -> ModelConfig:
    """Sentence-embedding models were saved without the head that their config.json still names."""
    if f"{bert_names(_architecture(settings)).head_dense}.weight" in source:
        return config
    return replace(config, masked_head=False, output_bias=False)


def _check_tensors(source: Tensors, config: ModelConfig, layout: Layout, directory: Path) -> None:
    used = {part.name for parts in layout.values() for part in parts}
    shapes = {
        name: source.shape(name) for name in source if name in used or not _TABLES.search(name)
    }
    for name, original in _copies(config, layout).items():
        if name in shapes and original in shapes:
            _refuse_other_numbers(source, name, original, directory)
            del shapes[name]
    if config.family == "encoder":
        shapes = {
            name: shape for name, shape in shapes.items() if name in used or not takes_no_part(name)
        }
    check_source(layout, shapes, str(directory))


def _weights(source: Tensors, config: ModelConfig, layout: Layout, directory: Path) -> Tensors:
    _check_tensors(source, config, layout, directory)
    banned: list[int] = []
    if config.family != "encoder":
        generation = read_json(directory / "generation_config.json")
        banned = list(banned_tokens(generation, config))

    def join(name: str, read: Callable[[str], Tensor]) -> Tensor:
        tensor = _joined(layout[name], read)
        if name == "output_bias" and config.family != "encoder":
            tensor = tensor.flatten()
            tensor[banned] = BANNED
        return in_our_order(name, tensor) if config.positions == "sinusoidal" else tensor

    def read(name: str) -> Tensor:
        return check_finite(name, source[name])

    def described(name: str) -> Tensor:
        """With the shape and the type, and no numbers."""
        return torch.empty(source.shape(name), dtype=source.dtype(name), device="meta")

    wholes = {name: join(name, described) for name in layout}
    return Tensors(
        {
            name: LazyTensor(tuple(whole.shape), whole.dtype, partial(join, name, read))
            for name, whole in wholes.items()
        }
    )


def _shortened(weights: Tensors, config: ModelConfig) -> Tensors:
    """Without the positions beyond the context."""
    name = "position_embedding.weight"
    if name not in weights:
        return weights
    shape, dtype, read = weights.entries[name]
    first = LazyTensor((config.context, *shape[1:]), dtype, lambda: read()[: config.context])
    return Tensors({**weights.entries, name: first})


def _copies(config: ModelConfig, layout: Layout) -> dict[str, str]:
    """Tensors that are others under another name, and those."""
    tied = [*_SHARED, *_TIED] if config.tied_embeddings else _SHARED
    copies = dict.fromkeys(tied, layout["embedding.weight"][0].name)
    if config.masked_head:  # the bias stands beside the copy of the embedding as well
        bias = layout["output_bias"][0].name
        copies |= {f"{bert_names(name).projection}.bias": bias for name in ENCODERS}
        copies.pop(bias, None)
    return copies


def _refuse_other_numbers(source: Tensors, name: str, original: str, directory: Path) -> None:
    if not same_numbers(source, name, original):
        raise UnsupportedError(
            f"{directory} has a {name} with other numbers than {original}, but its "
            "config.json says that they are the same (tie_word_embeddings). Set that to false if "
            "both count, or remove the former"
        )


def _joined(parts: list[Part], read: Callable[[str], Tensor]) -> Tensor:
    """One of our tensors: in float32 if its parts differ in type, or are computed with."""
    tensors = [_prepared(read(part.name), part) for part in parts]
    if len({tensor.dtype for tensor in tensors} | {torch.float64}) > 2:
        tensors = [tensor.float() for tensor in tensors]
    whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    return (whole.float() if whole.dtype == torch.float64 else whole).contiguous()


def _prepared(tensor: Tensor, part: Part) -> Tensor:
    if part.transposed:
        tensor = tensor.mT
    if part.stacked:
        tensor = tensor.flatten(0, 1)
    if part.order is not None:
        return tensor[torch.from_numpy(part.order)]
    if (part.plus, part.times) != (0.0, 1.0):
        return (tensor.float() + part.plus) * part.times
    return tensor


def _layout(
    config: ModelConfig, names: Collection[str], settings: TypedValues, origin: str
) -> Layout:
    num_layers = config.num_layers + config.num_encoder_layers
    if num_layers > len(names):
        raise CheckpointError(f"{origin} claims {num_layers} layers but has {len(names)} tensors")
    return layout_of(config, names, settings)


def layout_of(config: ModelConfig, names: Collection[str], settings: TypedValues) -> Layout:
    """`names`: all that the source has; several architectures have more than one spelling."""
    if config.family == "seq2seq":
        return seq2seq_layout(config, settings)
    if config.family == "encoder":
        return bert_layout(config, bert_names(_architecture(settings)), names)
    if config.positions == "rotary":
        theirs = decoder_names(_architecture(settings), settings)
        if "embed_tokens.weight" in names:  # saved without its head, as Qwen3-Embedding is
            bare = [theirs.embedding, theirs.final_norm, theirs.layer]
            embedding, final_norm, layer = (name.removeprefix("model.") for name in bare)
            theirs = theirs._replace(embedding=embedding, final_norm=final_norm, layer=layer)
        return llama_layout(config, theirs, interleaved=False)
    # GPT-2's own checkpoint was saved without its head, and so without this prefix.
    prefix = "transformer." if "transformer.wte.weight" in names else ""
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
    **DECODERS,
    "GPT2LMHeadModel": _gpt2_config,
    **SEQ2SEQ,
    **ENCODERS,
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
    with readme.open(encoding="utf-8", errors="replace") as file:
        head = file.read(4096)
    found = re.match(r"---\n(?:.*\n)*?license: *(\S+) *\n(?:.*\n)*?---\n", head)
    return found[1] if found else None
