"""Output comes in deltas, and is cut anywhere: its text and its calls stay the same."""

import random

import pytest

from quill.server.text.streaming import ToolCallParser
from quill.server.tools import PLAIN, TOOL_CALL_FORMATS, ToolCallDelta, ToolCallFormat, merge_deltas

FORMATS = {format_.name: format_ for format_ in (PLAIN, *TOOL_CALL_FORMATS)}
ARGUMENTS = ('{"a": {"b": ["}", "\\"{"]}, "c": "\\\\"}', "{}")


def written(format_: ToolCallFormat, text: str, arguments: tuple[str, ...]) -> str:
    calls = [f"{format_.head(f'f{number}')}{each}}}" for number, each in enumerate(arguments)]
    joined = (format_.between or "").join(calls)
    return f"{text}{format_.marker}{format_.before}{joined}{format_.after}"


def read(
    format_: ToolCallFormat, deltas: list[str], may_speak: bool = True
) -> tuple[str, list[ToolCallDelta]]:
    parser = ToolCallParser(format_, may_speak, lambda number: f"id{number}")
    text_, called = "", list[ToolCallDelta]()
    for delta in deltas:
        text, calls = parser.add(delta)
        text_ += text
        called += calls
    return text_ + parser.end(), merge_deltas(called)


def cut(text: str, rng: random.Random) -> list[str]:
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
        assert read(format_, cut(whole, rng), may_speak) == (text, expected)


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


@pytest.mark.parametrize("format_", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("text", ["", "Hello {you}", "a < b", "<tool_call", "[TOOL_CALLS", "[{"])
def test_text_alone_is_text(format_: ToolCallFormat, text: str) -> None:
    assert read(format_, list(text)) == (text, [])
