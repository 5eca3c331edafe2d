"""A tokenizer.json becomes metadata of a GGUF file: model/importers/gguf_tokenizer.py backwards.

Knows: byte-level BPE and the names of how it cuts text, SentencePiece's BPE, token types.
Does not know: the container, tensors. WordPiece and Unigram vocabularies are refused.
"""

import json
import re
from typing import Any

from quill.export.errors import UnsupportedModelError
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.checkpoint.typed_values import TypedValues
from quill.model.data.tokenizer import Tokenizer
from quill.model.importers.gguf_tokenizer import (
    BYTE,
    CONTROL,
    ENDS,
    NORMAL,
    PRE_TOKENIZERS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    byte_level,
    read_vocabulary,
)

# Words, digits, blanks, code, other scripts: what pre-tokenizers cut differently.
_SAMPLES = (
    "It's 12345.67 o'clock, WE'LL see: don't you think so?  Two  blanks, three   more.",
    "def add(x_1, y2):\n    return x_1 + y2  # sum\n\n\n\tif a != b && c[0] >= 10: pass\r\n",
    "Ein Käse für 3,50 €, naïve café — «да» 你好，世界 123 مرحبا हिन्दी 😀👍🏽 é ﬁ ½",
    " leading, trailing ",
)


def vocabulary_metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    tokenizer, special = checkpoint.tokenizer, checkpoint.special_tokens
    if tokenizer is None:
        raise UnsupportedModelError(
            "the model has no tokenizer, and a GGUF file needs one: put a tokenizer.json beside "
            "the weights, or convert it to transformers"
        )
    text = json.loads(tokenizer.to_json())
    if text["model"]["type"] != "BPE":
        raise UnsupportedModelError(
            f"the model's tokenizer is of the kind {text['model']['type']}; Quill writes BPE to "
            "GGUF, byte-level or SentencePiece's. Convert it to transformers or onnx"
        )
    kind = _sentencepiece if text["model"].get("byte_fallback") else _byte_level
    ids = {"bos": special.bos, "eos": special.eos, "unknown": special.unk, "padding": special.pad}
    tokens = _tokens(tokenizer, checkpoint.config.vocab_size)
    ids |= dict(zip(("eot", "eom"), _other_ends(checkpoint, tokens), strict=False))
    metadata = {
        **{f"{name}_token_id": index for name, index in ids.items() if index is not None},
        "add_bos_token": checkpoint.prepend_bos,
        "tokens": tokens,
        "token_type": _types(text, tokens, special.unk),
        **kind(text, tokens),
    }
    metadata = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    if checkpoint.chat_template is not None:
        metadata["tokenizer.chat_template"] = checkpoint.chat_template
    return metadata


def check_vocabulary(metadata: TypedValues, checkpoint: Checkpoint) -> None:
    """Raises an error unless the importer makes the same tokens of a few texts."""
    assert checkpoint.tokenizer is not None
    theirs = read_vocabulary(metadata, checkpoint.config.vocab_size)
    special = [checkpoint.tokenizer.decode([index]) for index in checkpoint.stop_ids]
    for sample in (*_SAMPLES, f"one{''.join(special)} two"):
        found = [each.encode(sample, True) for each in (theirs.tokenizer, checkpoint.tokenizer)]
        if found[0] != found[1]:
            raise UnsupportedModelError(
                "the model's tokenizer can't be written to a GGUF file: of the text "
                f"{sample[:40]!r} the file's would make {len(found[0])} tokens, and other ones "
                f"than the model's {len(found[1])}. Convert it to transformers or onnx"
            )


def _tokens(tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    """One for each embedding."""
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    for token, index in tokenizer.vocabulary.items():
        tokens[index] = token
    return tokens


def _types(text: dict[str, Any], tokens: list[str], unknown: int | None) -> list[int]:
    added = {token["id"]: token["special"] for token in text["added_tokens"]}
    known = {*text["model"]["vocab"], *(token["content"] for token in text["added_tokens"])}
    falls_back = text["model"].get("byte_fallback")

    def kind(index: int, token: str) -> int:
        if falls_back and index == unknown:
            return UNKNOWN
        if index in added:
            return CONTROL if added[index] else USER_DEFINED
        if falls_back and re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            return BYTE
        return NORMAL if token in known else UNUSED

    return [kind(index, token) for index, token in enumerate(tokens)]


def _other_ends(checkpoint: Checkpoint, tokens: list[str]) -> list[int]:
    """Tokens that end an answer and that no reader knows by their names."""
    known = {checkpoint.special_tokens.eos}
    return [
        index for index in checkpoint.stop_ids if index not in known and tokens[index] not in ENDS
    ]


def _merges(text: dict[str, Any]) -> list[tuple[str, str]]:
    """Files have them as lists of two, older ones as texts."""
    merges = text["model"]["merges"]
    return [tuple(each.split(" ", 1) if isinstance(each, str) else each) for each in merges]


def _byte_level(text: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    merges = [" ".join(merge) for merge in _merges(text)]
    return {"model": "gpt2", "pre": _pre_tokenizer(text), "merges": merges}


def _pre_tokenizer(text: dict[str, Any]) -> str:
    wanted = _cutting(text)
    for name, pre in PRE_TOKENIZERS.items():
        if _cutting(json.loads(byte_level(pre, [], [], []).to_str())) == wanted:
            return name
    raise UnsupportedModelError(
        "GGUF has no name that Quill knows for how the model's tokenizer cuts text before merging; "
        f"Quill knows {', '.join(PRE_TOKENIZERS)}. Convert the model to transformers or onnx"
    )


def _cutting(text: dict[str, Any]) -> object:
    """All that decides where text is cut, without what is only about offsets."""
    steps = text["pre_tokenizer"] or {}
    cutters = [
        {name: value for name, value in step.items() if name != "trim_offsets"}
        for step in steps.get("pretokenizers", [steps])
    ]
    return text["normalizer"], cutters, text["model"].get("ignore_merges", False)


def _sentencepiece(text: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    """Merges become scores: a token's is the higher, the earlier its first merge."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(_merges(text)):
        ranks.setdefault(left + right, rank)
    scores = [-float(ranks.get(token, len(ranks))) for token in tokens]
    before = json.dumps([text["normalizer"], text["pre_tokenizer"]])
    has_prefix = '"Prepend"' in before or re.search(r'"prepend_scheme": "(first|always)"', before)
    return {"model": "llama", "scores": scores, "add_space_prefix": bool(has_prefix)}
