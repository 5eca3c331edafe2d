"""The tokenizer out of a GGUF file gives the ids that transformers gives."""

import itertools
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    convert_gguf_tokenizer,
    get_gguf_tokenizer,
)

from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.checkpoint.typed_values import TypedValues
from quill.model.data.tokenizer import Tokenizer
from quill.model.errors import CheckpointError, UnsupportedError
from quill.model.importers.gguf_file import GgufFile
from quill.model.importers.gguf_llama import read_gguf
from quill.model.importers.gguf_tokenizer import PRE_TOKENIZERS, Vocabulary, read_vocabulary
from tests.model.conftest import TINY_MERGES, TINY_TOKENS, MakeGguf

NUM_STRINGS = 1500
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<empty_output>")
FIXED = [
    *(
        "",
        " ",
        "  ",
        "\n",
        "\t\t",
        "a",
        " a",
        "a ",
        "1",
        "12",
        " 1",
        "  1",
        "a  1b  2",
        "\r\n\r\n ",
    ),
    "It's 3:45, we'll go; they've 1,234,567.89 and it'S I'M",
    "def f(x):\n\treturn  x**2  # 2 spaces\n\n\n    pass\n",
    "日本語のテキスト、中文，한국어 텍스트",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽 é é ñ",
    "\x00\x01\x1f\x7f\x80\x9f\u200b\u2028\ufeff\u202e",
    "½ ² ٣ Ⅷ ① 一 ৪৫",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start",
    "<|endoftext|><|endoftext|> <|im_end|>x",
    "      six\u00a0nbsp\u3000wide   ",
    'https://example.org/a?b=1&c=%20#d {"k": [1, 2.5e-3, null]}',
]
POOLS = [
    "abcdefghijklmnopqrstuvwxyz ABC .,;:!?'-\n",
    "0123456789 ,.",
    " \t\n\r\u00a0\u2003\u3000",
    "(){}[]<>|=+-*/\\\"'`~@#$%^&_;:\n\t def return",
    "äöüßéèñçøåČŘЖжДдλΩشعא ",
    "日本語中文字漢한국어。、「」あアー",
    "😀😃👍🏽👩‍💻🇫🇷❤️✨🦜",
    "\x00\x01\x02\x07\x08\x0b\x0c\x1b\x7f\x85\u200d\u202e\ufffd",
    "½¼²³٣٤Ⅷ①⑩৪",
]


def varied_strings() -> list[str]:
    """The fixed ones, then mixtures out of seeded pools, then any assigned character at all."""
    rng = random.Random(2017)
    assigned = [c for c in map(chr, range(0x30000)) if unicodedata.category(c) not in ("Cs", "Cn")]
    strings = list(FIXED)
    while len(strings) < NUM_STRINGS:
        pools = [*rng.sample(POOLS, rng.randint(1, 4)), rng.choices(assigned, k=20)]
        pieces = ["".join(rng.choices(rng.choice(pools), k=rng.randint(1, 12))) for _ in range(6)]
        if rng.random() < 0.3:
            pieces.insert(rng.randrange(6), rng.choice(SPECIAL))
        strings.append("".join(pieces))
    return strings


STRINGS = varied_strings()


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> Any:
    """transformers' tokenizer of the same file, cutting text as SmolLM2's tokenizer.json does.

    transformers 5 builds vocabulary, merges and special tokens from the GGUF itself, but doesn't
    know that 'smollm' also splits off each digit.
    """
    architecture, description, _ = get_gguf_tokenizer(str(smollm2_gguf))
    inner, _ = convert_gguf_tokenizer(architecture, description)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    return tokenizer


@pytest.fixture(scope="module")
def ours(smollm2: Checkpoint) -> Tokenizer:
    assert smollm2.tokenizer is not None
    return smollm2.tokenizer


def test_there_are_more_than_a_thousand_different_strings() -> None:
    assert len(set(STRINGS)) > 1400


def test_ids_are_those_of_transformers(ours: Tokenizer, reference: Any) -> None:
    for text in STRINGS:
        expected = reference(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, parse_special=True) == expected, repr(text)


def test_special_tokens_inside_text_are_plain_text_unless_asked(
    ours: Tokenizer, reference: Any
) -> None:
    reference.backend_tokenizer.encode_special_tokens = True
    expected = [reference.backend_tokenizer.encode(text).ids for text in STRINGS]
    reference.backend_tokenizer.encode_special_tokens = False
    assert [ours.encode(text) for text in STRINGS] == expected
    assert all(not set(ids) & set(range(17)) for ids in expected)


# Bytes that SmolLM2 has no token for: it can't say some control characters.
UNSPEAKABLE = {*b"\x04\x06\x13\x14\x16\x1d\xc0\xc1\xf1\xf2", *range(0xF5, 0x100)}


def test_decoding_gives_the_text_of_transformers_and_the_text_itself(
    ours: Tokenizer, reference: Any
) -> None:
    for text in STRINGS:
        ids = ours.encode(text, parse_special=True)
        if not UNSPEAKABLE & set(text.encode()):
            assert ours.decode(ids) == text
        for skip in (False, True):
            expected = reference.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert ours.decode(ids, skip_special=skip) == expected


@pytest.mark.parametrize(
    "pre", [*("llama-bpe", "llama3", "dbrx"), *("qwen2", "deepseek-r1-qwen", "gpt-4o", "tekken")]
)
def test_patterns_are_those_of_transformers(pre: str) -> None:
    assert PRE_TOKENIZERS[pre].pattern == GGUF_PRE_TOKENIZER_SPLITS[pre]


def tiny_tokenizer(path: Path) -> Tokenizer:
    tokenizer = read_gguf(GgufFile(path)).tokenizer
    assert tokenizer is not None
    return tokenizer


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    return [TINY_TOKENS[index] for index in tokenizer.encode(text)]


def test_each_pre_tokenizer_cuts_digits_its_own_way(make_gguf: MakeGguf) -> None:
    cut = {
        pre: words(tiny_tokenizer(make_gguf({"tokenizer.ggml.pre": pre})), "the  12 the")
        for pre in ("gpt-2", "smollm", "refact", "dbrx", "gpt-4o", "tekken", "llama-bpe", "qwen2")
    }
    assert cut == {
        "gpt-2": ["the", "Ġ", "Ġ", "12", "Ġthe"],
        "smollm": ["the", "ĠĠ", "1", "2", "Ġthe"],
        "refact": ["the", "ĠĠ", "1", "2", "Ġthe"],
        "dbrx": ["the", "Ġ", "Ġ", "12", "Ġthe"],
        "gpt-4o": ["the", "Ġ", "Ġ", "12", "Ġthe"],
        "tekken": ["the", "Ġ", "Ġ", "1", "2", "Ġthe"],
        "llama-bpe": ["the", "Ġ", "Ġ", "12", "Ġthe"],
        "qwen2": ["the", "Ġ", "Ġ", "1", "2", "Ġthe"],
    }


def test_qwen2_composes_characters_first(make_gguf: MakeGguf) -> None:
    tokenizer = tiny_tokenizer(make_gguf({"tokenizer.ggml.pre": "qwen2"}))
    assert words(tokenizer, "e\u0301") == ["Ã", "©"]


def test_a_piece_that_is_a_token_stays_whole_for_llama_3(make_gguf: MakeGguf) -> None:
    # Without the merge "t h" nothing can grow to "the".
    metadata: dict[str, Any] = {"tokenizer.ggml.merges": TINY_MERGES[1:]}
    assert words(tiny_tokenizer(make_gguf(metadata)), "the") == ["t", "h", "e"]
    metadata |= {"tokenizer.ggml.pre": "llama-bpe"}
    assert words(tiny_tokenizer(make_gguf(metadata)), "the") == ["the"]


def test_user_defined_tokens_are_always_parsed(make_gguf: MakeGguf) -> None:
    tokenizer = tiny_tokenizer(make_gguf())
    assert words(tokenizer, "a<think>") == ["a", "<think>"]
    assert "<|im_end|>" not in words(tokenizer, "a<|im_end|>")


def test_texts_begin_with_bos_where_the_file_or_the_family_says_so(make_gguf: MakeGguf) -> None:
    llama = {"tokenizer.ggml.pre": "llama-bpe"}
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, False),
        (llama, True),
        (llama | {"tokenizer.ggml.add_bos_token": False}, False),
        ({"tokenizer.ggml.add_bos_token": True}, True),
    ]
    for metadata, expected in cases:
        assert read_gguf(GgufFile(make_gguf(metadata))).prepend_bos is expected


def test_eos_eot_and_known_ends_stop_an_answer(make_gguf: MakeGguf) -> None:
    metadata = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 6}
    assert read_gguf(GgufFile(make_gguf(metadata))).stop_ids == (0, 2, 5, 6)


@pytest.mark.parametrize(
    ("ends", "stop_ids"), [(["<|end|>"], (0,)), (["<|end|>", "<|return|>", "<|call|>"], (1, 2))]
)
def test_end_stops_an_answer_unless_the_answer_goes_on_behind_it(
    ends: list[str], stop_ids: tuple[int, ...]
) -> None:
    metadata: dict[str, Any] = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-4o"}
    lists: dict[str, Any] = {"tokens": ends, "token_type": [3] * len(ends), "merges": []}
    metadata |= {f"tokenizer.ggml.{name}": each for name, each in lists.items()}
    assert read_vocabulary(TypedValues(metadata, "the file"), len(ends)).stop_ids == stop_ids


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "  ", "<b>"]
KINDS = [2, 3, 3, *[6] * 256, 4, 4]
WORDS = ["▁t", "he", "▁the", "▁a", "aa", "aaa", "▁▁", "an", "▁an", "ab", "ba", "▁b", "th", "▁", "é"]
WORDS += [*"abcdefghnt.1", "日"]
PIECES, KINDS = PIECES + WORDS, KINDS + [1] * len(WORDS)
SCORES = [0.0] * (len(PIECES) - len(WORDS)) + [-float(rank) for rank in range(len(WORDS))]


def sentencepiece(text: str, prefix: bool) -> list[str]:
    """Its algorithm, slow and obvious: the best pair is joined, the first of equals."""
    text = ("▁" if prefix and text else "") + text.replace(" ", "▁")
    parts = list(text)
    while True:
        scores = [
            -WORDS.index(left + right) if left + right in WORDS else -1000
            for left, right in itertools.pairwise(parts)
        ]
        if max(scores, default=-1000) == -1000:
            break
        best = scores.index(max(scores))
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    as_bytes = [[f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [
        name
        for part, names in zip(parts, as_bytes, strict=True)
        for name in ([part] if part in WORDS else names)
    ]


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.scores": SCORES,
        "tokenizer.ggml.token_type": KINDS,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def sentencepiece_vocabulary(architecture: str = "llama", **changes: Any) -> Vocabulary:
    metadata = sentencepiece_metadata(**changes) | {"general.architecture": architecture}
    return read_vocabulary(TypedValues(metadata, "a test"), len(PIECES))


@pytest.mark.parametrize("prefix", [True, False])
def test_scores_and_bytes_make_the_tokens_of_sentencepiece(prefix: bool) -> None:
    vocabulary = sentencepiece_vocabulary(add_space_prefix=prefix)
    rng = random.Random(5)
    for _ in range(500):
        parts = rng.choices([*"aabth e.n1", "é", "日", "🦜", "\n", "<0x41>", "</s>"], k=8)
        text = " ".join("".join(parts).split())  # two blanks are a token of their own
        found = [PIECES[index] for index in vocabulary.tokenizer.encode(text)]
        assert found == sentencepiece(text, prefix)
        assert vocabulary.tokenizer.decode(vocabulary.tokenizer.encode(text)) == text


def test_special_and_user_defined_tokens_of_sentencepiece() -> None:
    plain = sentencepiece_vocabulary(add_space_prefix=False)
    assert (plain.prepend_bos, plain.stop_ids) == (True, (2,))
    words = [PIECES[i] for i in plain.tokenizer.encode("a  b<b></s>", parse_special=True)]
    assert words == ["a", "  ", "b", "<b>", "</s>"]
    phi = sentencepiece_vocabulary("phi3")
    ids = phi.tokenizer.encode("</s>\n a<s> b", parse_special=True)
    assert [PIECES[i] for i in ids] == ["</s>", "▁a", "<s>", "▁▁", "b"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": [0.0]}, "scores, one a token"),
        ({"precompiled_charsmap": [1]}, "precompiled_charsmap"),
    ],
)
def test_a_sentencepiece_vocabulary_that_is_damaged_or_unknown_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        sentencepiece_vocabulary(**changes)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "model 't5'"),
        ({"tokenizer.ggml.pre": "bloom"}, "pre-tokenizer 'bloom'"),
        ({"tokenizer.ggml.pre": None}, "pre-tokenizer 'default'"),
    ],
)
def test_unknown_tokenizers_are_refused_by_name(
    make_gguf: MakeGguf, metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_gguf(GgufFile(make_gguf(metadata)))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": TINY_TOKENS[:-1]}, "tokens, the embedding"),
        ({"tokenizer.ggml.tokens": [*TINY_TOKENS[:-1], "a"]}, "isn't of known tokens|twice"),
        ({"tokenizer.ggml.merges": ["q zz"]}, "merge 'q zz'"),
        ({"tokenizer.ggml.merges": ["nospace"]}, "merge 'nospace'"),
        ({"tokenizer.ggml.token_type": [1]}, "1 token types"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id is 1000000"),
    ],
)
def test_a_damaged_vocabulary_is_an_error(
    make_gguf: MakeGguf, metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_gguf(GgufFile(make_gguf(metadata)))
