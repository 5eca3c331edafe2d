"""Text survives the tokenizer exactly, and special tokens are special only when asked."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from quill.model.data.tokenizer import (
    CAUSAL_SPECIAL_TOKENS,
    END_OF_TEXT,
    MASK,
    SEQ2SEQ_SPECIAL_TOKENS,
    SpecialTokens,
    Tokenizer,
    byte_tokenizer,
    train_bpe,
)
from quill.model.errors import CheckpointError, ConfigError, RequestError

TEXTS = [
    "The quick brown fox jumps over the lazy dog. <s>The</s> fox didn't mind; 42 dogs did.\n" * 20,
    f"Überall <pad>blüht{END_OF_TEXT} die Wüste, und niemand sieht es.\n\n" * 20,
]
TRAINED = train_bpe(TEXTS, 330)
TOKENIZERS = {
    "trained": TRAINED,
    "trained for pairs": train_bpe(TEXTS, 330, SEQ2SEQ_SPECIAL_TOKENS),
    "bytes": byte_tokenizer(),
    "bytes for pairs": byte_tokenizer(SEQ2SEQ_SPECIAL_TOKENS),
}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())

# Lone surrogates are no Unicode text. Pieces that tokenizers like to change come up often.
tricky = st.sampled_from(
    [
        *("  ", "\r\n", "\x00", "\x7f", "\ufeff", "\u2028", "e\u0301", "é", "👩‍👩‍👧", "字"),
        *(" ,", " n't", "ﬁ"),
    ]
)
specials = st.sampled_from([*CAUSAL_SPECIAL_TOKENS, *SEQ2SEQ_SPECIAL_TOKENS])
texts = st.lists(st.text() | tricky | specials).map("".join)


@every_tokenizer
@given(text=texts)
def test_any_unicode_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text, parse_special=True)) == text


@every_tokenizer
@given(text=texts)
def test_text_never_becomes_a_special_token_unasked(tokenizer: Tokenizer, text: str) -> None:
    special = tokenizer.special
    assert not {special.bos, special.eos, special.pad} & set(tokenizer.encode(text))
    assert tokenizer.encode_all([text]) == [tokenizer.encode(text)]


def test_special_tokens_are_parsed_when_asked() -> None:
    end = TRAINED.special.eos
    assert end is not None
    ids = TRAINED.encode(f"fox{END_OF_TEXT}dog", parse_special=True)
    assert ids == [*TRAINED.encode("fox"), end, *TRAINED.encode("dog")]
    assert TRAINED.decode(ids) == f"fox{END_OF_TEXT}dog"
    assert TRAINED.decode(ids, skip_special=True) == "foxdog"


def test_a_mask_stands_for_a_word_with_the_space_before_it() -> None:
    tokenizer = train_bpe(["the union of states"] * 3, 300, [MASK])
    masked = tokenizer.encode("the [MASK] of", parse_special=True)
    assert masked == tokenizer.encode("the[MASK] of", parse_special=True)
    assert tokenizer.decode(masked, skip_special=True) == "the of"


def test_parts_of_special_tokens_go_by_name() -> None:
    assert byte_tokenizer().special == SpecialTokens(bos=0, eos=0)
    assert TOKENIZERS["trained for pairs"].special == SpecialTokens(bos=1, eos=2, pad=0)
    assert byte_tokenizer(()).special == SpecialTokens()


def test_a_byte_is_its_id_after_the_special_tokens() -> None:
    everything = bytes(range(256)).decode("latin-1")
    assert byte_tokenizer().encode("aé\x00") == [1 + byte for byte in "aé\x00".encode()]
    assert byte_tokenizer(()).encode(everything) == list(everything.encode())
    assert byte_tokenizer(SEQ2SEQ_SPECIAL_TOKENS).vocab_size == 259


def test_half_a_character_decodes_to_the_replacement_character() -> None:
    assert byte_tokenizer(()).decode("é".encode()[:1]) == "\ufffd"


def test_training_shortens_text_like_its_own() -> None:
    assert TRAINED.vocab_size == 330
    assert len(TRAINED.encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_training_twice_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("one", "other"):
        train_bpe(iter(TEXTS), 330).save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_a_vocabulary_never_outgrows_its_text() -> None:
    assert train_bpe(["abab"], 5000).vocab_size < 300


def test_a_vocabulary_without_room_for_every_byte_is_refused() -> None:
    with pytest.raises(ConfigError, match="256 bytes and 1 special tokens need at least 257"):
        train_bpe(TEXTS, 256)


def test_a_saved_tokenizer_is_the_same_and_others_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    TRAINED.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.encode_all(TEXTS) == TRAINED.encode_all(TEXTS)
    assert loaded.special == TRAINED.special
    other = PreTrainedTokenizerFast(tokenizer_file=str(path))
    assert other(TEXTS[0])["input_ids"] == TRAINED.encode(TEXTS[0])


def test_special_tokens_given_on_loading_win(tmp_path: Path) -> None:
    TRAINED.save(tmp_path / "tokenizer.json")
    special = SpecialTokens(bos=7, eos=8)
    assert Tokenizer.load(tmp_path / "tokenizer.json", special).special == special


@pytest.mark.parametrize(
    "content", [None, "", "{", "[]", "{}", '{"model": 5}', '{"model": {}}', "\ud800"]
)
def test_a_file_that_is_no_tokenizer_is_refused_by_name(
    tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(path)


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestError, match="isn't Unicode"):
        TRAINED.encode("a\ud800b")
