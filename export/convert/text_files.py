"""Writes what a Hugging Face directory has beside its weights: the tokenizer, defaults, pooling.

Knows: tokenizer.json and the files that go with it; model/importers/huggingface_text.py reads them.
Does not know: tensors, the shape of the model.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from quill.model.checkpoint.checkpoint import TOKENIZER_FILE, Checkpoint, Pooling
from quill.model.importers.huggingface_text import MODULES

# BERT's names for what begins and ends a text.
_ENCODER_NAMES = {"bos": "cls", "eos": "sep"}
_POOLINGS: dict[Pooling, str] = {"mean": "mean_tokens", "first": "cls_token", "last": "lasttoken"}


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_text_files(directory: Path, checkpoint: Checkpoint) -> None:
    write_json(directory / "generation_config.json", generation_config(checkpoint))
    if checkpoint.tokenizer is not None:
        checkpoint.tokenizer.save(directory / TOKENIZER_FILE)
        _add_ends(directory / TOKENIZER_FILE, checkpoint)
        write_json(directory / "tokenizer_config.json", _tokenizer_config(checkpoint))
    if checkpoint.chat_template is not None:
        path = directory / "chat_template.jinja"
        path.write_text(checkpoint.chat_template, encoding="utf-8")
    if checkpoint.pooling is not None:
        _write_pooling(directory, checkpoint, checkpoint.pooling)


def token_ids(checkpoint: Checkpoint) -> dict[str, Any]:
    """By their names in config.json. In an encoder–decoder `bos` begins the answer."""
    special, translates = checkpoint.special_tokens, checkpoint.config.family == "seq2seq"
    found = {
        "decoder_start_token_id" if translates else "bos_token_id": special.bos,
        "eos_token_id": special.eos,
        "pad_token_id": special.pad,
    }
    return {name: index for name, index in found.items() if index is not None}


def generation_config(checkpoint: Checkpoint) -> dict[str, Any]:
    ids, generation = token_ids(checkpoint), dict(checkpoint.generation)
    if checkpoint.stop_ids:
        ids["eos_token_id"] = list(checkpoint.stop_ids)
    if generation:
        greedy = generation.get("temperature") == 0
        generation["do_sample"] = not greedy
        if greedy:
            del generation["temperature"]
    return ids | generation


def _tokenizer_config(checkpoint: Checkpoint) -> dict[str, Any]:
    assert checkpoint.tokenizer is not None
    config = checkpoint.config
    texts = {index: token for token, index in checkpoint.tokenizer.vocabulary.items()}
    names = _ENCODER_NAMES if config.family == "encoder" else {}
    tokens = {
        f"{names.get(part, part)}_token": texts[index]
        for part, index in vars(checkpoint.special_tokens).items()
        if index in texts and not (part == "bos" and config.family == "seq2seq")
    }
    segments = ["token_type_ids"] if config.num_segments else []
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", *segments, "attention_mask"],
        "model_max_length": config.context,
        "clean_up_tokenization_spaces": False,
        **tokens,
    }


def _add_ends(path: Path, checkpoint: Checkpoint) -> None:
    """Lets the tokenizer itself put bos before texts, and eos after them, where Quill does."""
    inner, special = tokenizers.Tokenizer.from_file(str(path)), checkpoint.special_tokens
    if inner.post_processor is not None and not isinstance(
        inner.post_processor, processors.ByteLevel
    ):
        return
    ends = checkpoint.append_eos or checkpoint.config.family == "seq2seq"
    first = [special.bos] if checkpoint.prepend_bos else []
    last = [special.eos] if ends else []
    tokens = {index: inner.id_to_token(index) for index in first + last if index is not None}
    if not tokens:
        return
    inner.post_processor = processors.TemplateProcessing(
        single=[
            *(tokens[index] for index in first if index is not None),
            "$A",
            *(tokens[index] for index in last if index is not None),
        ],
        special_tokens=[(token, index) for index, token in tokens.items()],
    )
    inner.save(str(path), pretty=False)


def _write_pooling(directory: Path, checkpoint: Checkpoint, pooling: Pooling) -> None:
    """As sentence-transformers has it."""
    kinds = {"Transformer": "", "Pooling": "1_Pooling"}
    kinds |= {"Normalize": "2_Normalize"} if checkpoint.normalize else {}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds.items())
    ]
    write_json(directory / MODULES, modules)
    size = {"word_embedding_dimension": checkpoint.config.d_model}
    mode = {f"pooling_mode_{_POOLINGS[pooling]}": True}
    write_json(directory / "1_Pooling" / "config.json", size | mode)
