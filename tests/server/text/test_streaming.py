"""Text that comes in pieces: whole characters, stop strings, tool calls."""

import random

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models

from quill.model.data.tokenizer import byte_tokenizer, train_bpe
from quill.server.text.streaming import Decoder, StopStrings, ToolCallParser, WindowDecoder
from quill.server.text.tokenizer import Text
from quill.server.tools import PLAIN, TOOL_CALL_FORMATS, ToolCallDelta, ToolCallFormat, merge_deltas

BYTES = Text(byte_tokenizer()._json)
PAIRS = Text(train_bpe(["Größe, naïve, 日本語 日本, 👩‍👩‍👧 👩‍👩"] * 3, 300)._json)


def pieces(decoder: Decoder, ids: list[int]) -> list[str]:
    return [*(decoder.add(token) for token in ids), decoder.end()]


@given(st.text())
def test_any_text_comes_in_whole_characters(text: str) -> None:
    for tokenizer in (BYTES, PAIRS):
        parts = pieces(tokenizer.decoder(), tokenizer.encode(text))
        assert "".join(parts) == text
        assert parts[-1] == ""


@given(st.lists(st.integers(0, 299)))
def test_pieces_of_any_tokens_are_the_text_of_all(ids: list[int]) -> None:
    assert "".join(pieces(PAIRS.decoder(), ids)) == PAIRS.decode(ids)


def _sentencepiece() -> tokenizers.Tokenizer:
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = ["<unk>", *byte_pieces, "▁", "▁He", "llo", "▁wor", "ld", "é"]
    scored = [(piece, 0.0) for piece in vocabulary]
    inner = tokenizers.Tokenizer(models.Unigram(scored, 0, byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return inner


@given(st.lists(st.sampled_from(["▁He", "llo", "▁wor", "ld", "é", "👩", "日"]), max_size=12))
def test_tokens_that_depend_on_their_neighbours_come_in_whole_characters(words: list[str]) -> None:
    inner = _sentencepiece()
    ids: list[int] = []
    for word in words:
        known = inner.token_to_id(word)
        ids += [known] if known is not None else [byte + 1 for byte in word.encode()]
    parts = pieces(WindowDecoder(lambda some: str(inner.decode(list(some)))), ids)
    assert "".join(parts) == inner.decode(ids)
    assert "\ufffd" not in "".join(parts)


@given(st.text())
def test_bytes_of_tokens_are_the_texts(text: str) -> None:
    for tokenizer in (BYTES, PAIRS):
        spelled = b"".join(map(tokenizer.spelled, tokenizer.encode(text)))
        assert spelled == text.encode()


def test_tokens_that_fall_back_to_bytes_or_begin_with_a_space_have_their_true_bytes() -> None:
    text = Text(_sentencepiece().to_str())
    ids = [258, 259, 260, 1 + 0xC3, 1 + 0xA9, 262]  # "▁He", "llo", "▁wor", two bytes, "é"
    assert [*map(text.spelled, ids)] == [b" He", b"llo", b" wor", b"\xc3", b"\xa9", "é".encode()]


def test_a_special_token_is_spelled_as_it_is_called() -> None:
    inner = tokenizers.Tokenizer.from_str(byte_tokenizer()._json)
    inner.add_special_tokens(["<é>"])
    text = Text(inner.to_str())
    (token,) = inner.encode("<é>").ids
    assert text.spelled(token) == "<é>".encode()


def cut(text: str, stops: list[str]) -> str:
    """The oracle: one character after another."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@example(["ab"], ["a", "b"])
@example(["abab", "b"], ["aba", "ba"])
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("abc", max_size=4)),
)
def test_text_ends_before_the_first_stop_string_however_it_is_cut(
    stops: list[str], parts: list[str]
) -> None:
    matcher, shown, found = StopStrings(stops), "", False
    for part in parts:
        released = matcher.add(part)
        shown += released.text
        assert cut("".join(parts), stops).startswith(shown)
        if released.found:
            found = True
            break
    if not found:
        shown += matcher.end()
    assert shown == cut("".join(parts), stops)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    matcher = StopStrings(["</end>"])
    assert matcher.add("one <") == ("one ", False)
    assert matcher.add("b> two </en") == ("<b> two ", False)
    assert matcher.add("d> three") == ("", True)


FORMATS = {format_.name: format_ for format_ in (PLAIN, *TOOL_CALL_FORMATS)}
ARGUMENTS = ('{"a": {"b": ["}", "\\"{"]}, "c": "\\\\"}', "{}")


def written(format_: ToolCallFormat, text: str, arguments: tuple[str, ...]) -> str:
    calls = [f"{format_.head(f'f{number}')}{each}}}" for number, each in enumerate(arguments)]
    joined = (format_.between or "").join(calls)
    return f"{text}{format_.marker}{format_.before}{joined}{format_.after}"


def read(
    format_: ToolCallFormat, deltas: list[str], may_speak: bool = True
) -> tuple[str, list[ToolCallDelta]]:
    parser = ToolCallParser(format_, may_speak, lambda number: f"id{number}", ["f0", "f00"])
    text_, called = "", list[ToolCallDelta]()
    for delta in deltas:
        text, calls = parser.add(delta)
        text_ += text
        called += calls
    return text_ + parser.end(), merge_deltas(called)


def split_at_random(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, len(text))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("may_speak", [False, True])
@pytest.mark.parametrize("format_", FORMATS.values(), ids=FORMATS)
def test_cuts_make_no_difference(format_: ToolCallFormat, may_speak: bool) -> None:
    text = "Well < <tool_ [\n" if may_speak and format_.marker else ""
    arguments = ARGUMENTS if format_.between is not None else ARGUMENTS[:1]
    whole = written(format_, text, arguments)
    expected = [
        ToolCallDelta(number, f"id{number}", f"f{number}", each)
        for number, each in enumerate(arguments)
    ]
    rng = random.Random(format_.name)
    for _ in range(50):
        assert read(format_, split_at_random(whole, rng), may_speak) == (text, expected)


@pytest.mark.parametrize("format_", FORMATS.values(), ids=FORMATS)
def test_what_is_cut_off_is_a_beginning(format_: ToolCallFormat) -> None:
    whole = written(format_, "Hm. " if format_.marker else "", ARGUMENTS[:1])
    text_, (full,) = read(format_, [whole])
    for length in range(len(whole)):
        text, calls = read(format_, list(whole[:length]))
        assert text_.startswith(text) or text == whole[:length]
        for call in calls:
            assert (call.id, call.name) == (full.id, full.name)
            assert full.arguments.startswith(call.arguments)


@pytest.mark.parametrize(
    "whole",
    [
        '{"name": "f00", "arguments": {"a": " }"}}',
        '```json\n{\n  "name": "f00",\n  "arguments": {"a": " }"}\n}\n```',
    ],
)
def test_a_call_without_its_marker_is_read_however_it_is_cut(whole: str) -> None:
    """As Qwen2.5-Coder writes them: 200 of 200 tasks of BFCL had no call before."""
    rng = random.Random(1)
    for _ in range(50):
        expected = "", [ToolCallDelta(0, "id0", "f00", '{"a": " }"}')]
        assert read(FORMATS["hermes"], split_at_random(whole, rng)) == expected


@pytest.mark.parametrize(
    "text",
    ['```json\n{"name": "other", "arguments": {}}', '{"name": "f0"', '```python\n{"name": "f0"'],
)
def test_other_json_is_text(text: str) -> None:
    assert read(FORMATS["hermes"], list(text)) == (text, [])


@pytest.mark.parametrize("format_", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("text", ["", "Hello {you}", "a < b", "<tool_call", "[TOOL_CALLS", "[{"])
def test_text_alone_is_text(format_: ToolCallFormat, text: str) -> None:
    assert read(format_, list(text)) == (text, [])
