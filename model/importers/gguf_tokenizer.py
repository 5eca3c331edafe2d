"""Builds a tokenizer from the metadata of a GGUF file.

Knows: byte-level BPE, how each known `tokenizer.ggml.pre` cuts text before merging; SentencePiece's
BPE, whose scores are merges and whose unknown characters are bytes; BERT's WordPiece; token types.
Does not know: the container, tensors. Unigram vocabularies are refused.
"""

from collections.abc import Sequence
from typing import NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from quill.model.checkpoint.typed_values import TypedValues
from quill.model.data.tokenizer import SpecialTokens, Tokenizer
from quill.model.errors import CheckpointError, UnsupportedError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_SPACE = "▁"  # SentencePiece's

# Tokens that end an answer whatever the file's eos is; llama.cpp stops at them too.
ENDS = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>"}
ENDS |= {"<|end|>", "<end_of_turn>", "<|return|>", "<|call|>"}
# Phi-3's tokens swallow the blanks behind them, but for these.
_NOT_STRIPPING = {"<unk>", "<s>", "<|endoftext|>"}


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


def _by_case(ends: str, digits: str) -> str:
    """The pattern of OpenAI's o200k and of Tekken: a word is cut where its case changes."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{before}{upper}*{lower}+{ends}|{before}{upper}+{lower}*{ends}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


# As in llama.cpp's src/llama-vocab.cpp and the tokenizer.json of GPT-2, SmolLM2, Granite, Llama 3,
# OLMo 2, Qwen2, Phi-4-mini and Mistral Nemo.
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(None),
    "smollm": PreTokenizer(None, individual_digits=True),
    "refact": PreTokenizer(None, individual_digits=True),
    "llama-bpe": PreTokenizer(_cl100k(r"\p{N}{1,3}"), ignore_merges=True, prepend_bos=True),
    "dbrx": PreTokenizer(_cl100k(r"\p{N}{1,3}")),
    "qwen2": PreTokenizer(_cl100k(r"\p{N}"), composed=True),
    "gpt-4o": PreTokenizer(_by_case(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}")),
    "tekken": PreTokenizer(_by_case("", r"\p{N}"), ignore_merges=True, prepend_bos=True),
}
# The same under other names.
PRE_TOKENIZERS |= dict.fromkeys(("phi-2", "olmo"), PRE_TOKENIZERS["gpt-2"])
PRE_TOKENIZERS |= dict.fromkeys(("llama3", "llama-v3"), PRE_TOKENIZERS["llama-bpe"])
PRE_TOKENIZERS |= {"deepseek-r1-qwen": PRE_TOKENIZERS["qwen2"]}


class Vocabulary(NamedTuple):
    """The file's text settings."""

    tokenizer: Tokenizer
    prepend_bos: bool
    stop_ids: tuple[int, ...]
    chat_template: str | None


def read_vocabulary(metadata: TypedValues, vocab_size: int) -> Vocabulary:
    model = metadata.text("tokenizer.ggml.model")
    if model not in ("gpt2", "llama", "bert"):
        raise UnsupportedError(
            f"the GGUF file has a tokenizer of the model {model!r}; Quill knows byte-level BPE "
            "('gpt2'), SentencePiece's ('llama') and WordPiece ('bert'). Import the model's "
            "Hugging Face directory, which has a tokenizer.json"
        )
    tokens = metadata.texts("tokenizer.ggml.tokens")
    if len(tokens) != vocab_size:
        raise CheckpointError(
            f"the tokenizer has {len(tokens):,} tokens, the embedding {vocab_size:,}"
        )
    types = _token_types(metadata, len(tokens))
    special = _special_tokens(metadata, len(tokens))
    template = metadata.text("tokenizer.chat_template", "")
    if model == "llama":
        inner, prepend_bos = _sentencepiece(metadata, tokens, types, special), True
    elif model == "bert":
        inner, prepend_bos = _wordpiece(tokens, types, special), True
    else:
        pre = _pre_tokenizer(metadata)
        inner = byte_level(pre, tokens, types, _merges(metadata, set(tokens)))
        prepend_bos = pre.prepend_bos
    return Vocabulary(
        tokenizer=Tokenizer(inner, special),
        prepend_bos=metadata.flag("tokenizer.ggml.add_bos_token", prepend_bos),
        stop_ids=_stop_ids(metadata, tokens, types),
        chat_template=template or None,
    )


def _pre_tokenizer(metadata: TypedValues) -> PreTokenizer:
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


def byte_level(
    pre: PreTokenizer, tokens: list[str], types: list[int], merges: list[tuple[str, str]]
) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(
        models.BPE(_ids(tokens), merges, ignore_merges=pre.ignore_merges, fuse_unk=False)
    )
    inner.normalizer = normalizers.NFC() if pre.composed else None
    inner.pre_tokenizer = pre_tokenizers.Sequence(_cutters(pre))
    inner.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, types, strict=True))
    inner.add_special_tokens([_added(token, True) for token, kind in kinds if kind == CONTROL])
    inner.add_tokens([_added(token, False) for token, kind in kinds if kind == USER_DEFINED])
    return inner


def _ids(tokens: list[str]) -> dict[str, int]:
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise CheckpointError("the tokenizer has the same token twice")
    return ids


def _sentencepiece(
    metadata: TypedValues, tokens: list[str], types: list[int], special: SpecialTokens
) -> tokenizers.Tokenizer:
    """Blanks are characters as all others are, and the text is merged as a whole."""
    if metadata.get("tokenizer.ggml.precompiled_charsmap"):
        raise UnsupportedError(
            "the GGUF file's tokenizer replaces characters (precompiled_charsmap); Quill doesn't"
        )
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(f"there aren't {len(tokens):,} tokenizer.ggml.scores, one a token")
    kinds = list(zip(tokens, types, strict=True))
    merges = _merges_by_score(kinds, scores)
    unknown = None if special.unk is None else tokens[special.unk]
    inner = tokenizers.Tokenizer(
        models.BPE(_ids(tokens), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    before = [normalizers.Prepend(_SPACE)] if prefix else []
    blanks = [*before, normalizers.Replace(" ", _SPACE)]
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    inner.normalizer = normalizers.Sequence(blanks)
    inner.decoder = decoders.Sequence(decoding)
    strips = metadata.text("general.architecture") == "phi3"
    inner.add_special_tokens(
        [
            _added(token, True, rstrip=strips and token not in _NOT_STRIPPING)
            for token, kind in kinds
            if kind == CONTROL
        ]
    )
    # Matched after blanks are replaced, as SentencePiece does; a prefix would be put before them.
    inner.add_tokens(
        [
            _added(token, False, normalized=not prefix)
            for token, kind in kinds
            if kind == USER_DEFINED
        ]
    )
    return inner


def _wordpiece(tokens: list[str], types: list[int], special: SpecialTokens) -> tokenizers.Tokenizer:
    """Of lower case: llama.cpp knows no other. The file marks a word's first piece, BERT's own
    vocabulary the others."""
    if special.unk is None:
        raise CheckpointError("the tokenizer has no tokenizer.ggml.unknown_token_id")
    pieces = [
        token if kind != NORMAL or token[:1] + token[-1:] == "[]" else _marked_inside(token)
        for token, kind in zip(tokens, types, strict=True)
    ]
    inner = tokenizers.Tokenizer(models.WordPiece(_ids(pieces), unk_token=pieces[special.unk]))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    kinds = zip(pieces, types, strict=True)
    inner.add_special_tokens([_added(token, True) for token, kind in kinds if kind == CONTROL])
    return inner


def _marked_inside(token: str) -> str:
    return token.removeprefix(_SPACE) if token.startswith(_SPACE) else f"##{token}"


def _merges_by_score(
    kinds: Sequence[tuple[str, int]], scores: list[float]
) -> list[tuple[str, str]]:
    """All pairs that make up a token, the best token's first; of one token's, the longest left."""
    normal = {token for token, kind in kinds if kind == NORMAL}
    ranked = sorted(
        ((-score, token) for (token, _), score in zip(kinds, scores, strict=True)),
        key=lambda each: each[0],
    )
    return [
        (token[:cut], token[cut:])
        for _, token in ranked
        if token in normal
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in normal and token[cut:] in normal
    ]


def _cutters(pre: PreTokenizer) -> list[pre_tokenizers.PreTokenizer]:
    cutters: list[pre_tokenizers.PreTokenizer] = []
    if pre.individual_digits:
        cutters.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern is not None:
        cutters.append(pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
    use_regex = pre.pattern is None
    cutters.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex))
    return cutters


def _added(
    token: str, special: bool, *, normalized: bool = False, rstrip: bool = False
) -> AddedToken:
    return AddedToken(token, special=special, normalized=normalized, rstrip=rstrip)


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
    ends = {
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == CONTROL and token in ENDS
    }
    ends |= {index for index in named if index is not None}
    # With gpt-oss a message ends with <|end|>, such as its reasoning, and the answer goes on.
    if {"<|return|>", "<|call|>"} <= {tokens[index] for index in ends}:
        ends = {index for index in ends if tokens[index] != "<|end|>"}
    return tuple(sorted(ends))
