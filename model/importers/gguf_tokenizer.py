"""Builds a tokenizer from the metadata of a GGUF file.

Knows: byte-level BPE, how each known `tokenizer.ggml.pre` cuts text before merging, token types.
Does not know: the container, tensors. SentencePiece vocabularies are refused.
"""

from typing import NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from quill.model.checkpoint.typed_values import TypedValues
from quill.model.data.tokenizer import SpecialTokens, Tokenizer
from quill.model.errors import CheckpointError, UnsupportedError

_CONTROL, _USER_DEFINED = 3, 4

# Tokens that end an answer whatever the file's eos is; llama.cpp stops at them too.
_ENDS = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>"}


class PreTokenizer(NamedTuple):
    """How a family of tokenizers cuts text before merging."""

    pattern: str | None  # None: GPT-2's own, which the library has built in
    individual_digits: bool = False
    ignore_merges: bool = False  # a word that is a token isn't merged again
    composed: bool = False  # Unicode's NFC first
    prepend_bos: bool = False  # unless the file overrides it


def _cl100k(digits: str) -> str:
    """The pattern of OpenAI's cl100k, with the given rule for digits."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


# As in llama.cpp's src/llama-vocab.cpp and the tokenizer.json of GPT-2, SmolLM2, Llama 3 and Qwen2.
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(None),
    "smollm": PreTokenizer(None, individual_digits=True),
    "llama-bpe": PreTokenizer(_cl100k(r"\p{N}{1,3}"), ignore_merges=True, prepend_bos=True),
    "qwen2": PreTokenizer(_cl100k(r"\p{N}"), composed=True),
}


class Vocabulary(NamedTuple):
    """The file's text settings."""

    tokenizer: Tokenizer
    prepend_bos: bool
    stop_ids: tuple[int, ...]
    chat_template: str | None


def read_vocabulary(metadata: TypedValues, vocab_size: int) -> Vocabulary:
    pre = _pre_tokenizer(metadata)
    tokens = metadata.texts("tokenizer.ggml.tokens")
    if len(tokens) != vocab_size:
        raise CheckpointError(
            f"the tokenizer has {len(tokens):,} tokens, the embedding {vocab_size:,}"
        )
    types = _token_types(metadata, len(tokens))
    special = _special_tokens(metadata, len(tokens))
    template = metadata.text("tokenizer.chat_template", "")
    return Vocabulary(
        tokenizer=Tokenizer(_build(pre, tokens, types, _merges(metadata, set(tokens))), special),
        prepend_bos=metadata.flag("tokenizer.ggml.add_bos_token", pre.prepend_bos),
        stop_ids=_stop_ids(metadata, tokens, types),
        chat_template=template or None,
    )


def _pre_tokenizer(metadata: TypedValues) -> PreTokenizer:
    model = metadata.text("tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedError(
            f"the GGUF file has a tokenizer of the model {model!r}; Quill knows byte-level BPE "
            "('gpt2') only. Import the model's Hugging Face directory, which has a tokenizer.json"
        )
    name = metadata.text("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedError(
            f"the GGUF file has the pre-tokenizer {name!r}; Quill knows "
            f"{', '.join(PRE_TOKENIZERS)}. Another one would give other tokens"
        )
    return PRE_TOKENIZERS[name]


def _token_types(metadata: TypedValues, num_tokens: int) -> list[int]:
    types = metadata.integers("tokenizer.ggml.token_type")
    if len(types) != num_tokens:
        raise CheckpointError(f"there are {num_tokens:,} tokens but {len(types):,} token types")
    return types


def _merges(metadata: TypedValues, vocabulary: set[str]) -> list[tuple[str, str]]:
    """The library raises a bare `Exception` for a merge of unknown tokens: look before."""
    merges = []
    for merge in metadata.texts("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocabulary:
            raise CheckpointError(f"the tokenizer's merge {merge!r} isn't of known tokens")
        merges.append((left, right))
    return merges


def _build(
    pre: PreTokenizer, tokens: list[str], types: list[int], merges: list[tuple[str, str]]
) -> tokenizers.Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError("the tokenizer has the same token twice")
    inner = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, ignore_merges=pre.ignore_merges, fuse_unk=False)
    )
    inner.normalizer = normalizers.NFC() if pre.composed else None
    inner.pre_tokenizer = pre_tokenizers.Sequence(_cutters(pre))
    inner.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, types, strict=True))
    inner.add_special_tokens([_added(token, True) for token, kind in kinds if kind == _CONTROL])
    inner.add_tokens([_added(token, False) for token, kind in kinds if kind == _USER_DEFINED])
    return inner


def _cutters(pre: PreTokenizer) -> list[pre_tokenizers.PreTokenizer]:
    cutters: list[pre_tokenizers.PreTokenizer] = []
    if pre.individual_digits:
        cutters.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern is not None:
        cutters.append(pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
    use_regex = pre.pattern is None
    cutters.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex))
    return cutters


def _added(token: str, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def _special_tokens(metadata: TypedValues, num_tokens: int) -> SpecialTokens:
    return SpecialTokens(
        bos=_token_id(metadata, "bos", num_tokens),
        eos=_token_id(metadata, "eos", num_tokens),
        pad=_token_id(metadata, "padding", num_tokens),
        unk=_token_id(metadata, "unknown", num_tokens),
    )


def _token_id(metadata: TypedValues, name: str, num_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if metadata.get(key) is None:
        return None
    index = metadata.integer(key)
    if not 0 <= index < num_tokens:
        raise CheckpointError(f"{key} is {index}, but there are {num_tokens:,} tokens")
    return index


def _stop_ids(metadata: TypedValues, tokens: list[str], types: list[int]) -> tuple[int, ...]:
    named = [_token_id(metadata, name, len(tokens)) for name in ("eos", "eot", "eom")]
    ends = [
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == _CONTROL and token in _ENDS
    ]
    return tuple(sorted({*ends, *(index for index in named if index is not None)}))
