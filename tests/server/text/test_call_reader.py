"""Answers come in pieces, and are cut anywhere: what is said and what is called stays the same."""

import random

import pytest

from quill.server.text.call_reader import CallReader
from quill.server.tools import CALL_FORMS, PLAIN, CallForm, CallPiece, whole_calls

FORMS = {form.name: form for form in (PLAIN, *CALL_FORMS)}
ARGUMENTS = ('{"a": {"b": ["}", "\\"{"]}, "c": "\\\\"}', "{}")


def written(form: CallForm, text: str, arguments: tuple[str, ...]) -> str:
    calls = [f"{form.head(f'f{number}')}{each}}}" for number, each in enumerate(arguments)]
    return f"{text}{form.marker}{form.before}{(form.between or '').join(calls)}{form.after}"


def read(form: CallForm, pieces: list[str], may_speak: bool = True) -> tuple[str, list[CallPiece]]:
    reader = CallReader(form, may_speak, lambda number: f"id{number}")
    said, called = "", list[CallPiece]()
    for piece in pieces:
        text, calls = reader.add(piece)
        said += text
        called += calls
    return said + reader.end(), whole_calls(called)


def cut(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, len(text))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("may_speak", [False, True])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_cuts_make_no_difference(form: CallForm, may_speak: bool) -> None:
    text = "Well < <tool_ [\n" if may_speak and form.marker else ""
    arguments = ARGUMENTS if form.between is not None else ARGUMENTS[:1]
    whole = written(form, text, arguments)
    expected = [
        CallPiece(number, f"id{number}", f"f{number}", each)
        for number, each in enumerate(arguments)
    ]
    rng = random.Random(form.name)
    for _ in range(50):
        assert read(form, cut(whole, rng), may_speak) == (text, expected)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_is_cut_off_is_a_beginning(form: CallForm) -> None:
    whole = written(form, "Hm. " if form.marker else "", ARGUMENTS[:1])
    said, (full,) = read(form, [whole])
    for length in range(len(whole)):
        text, calls = read(form, list(whole[:length]))
        assert said.startswith(text) or text == whole[:length]
        for call in calls:
            assert (call.id, call.name) == (full.id, full.name)
            assert full.arguments.startswith(call.arguments)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("text", ["", "Hello {you}", "a < b", "<tool_call", "[TOOL_CALLS", "[{"])
def test_text_alone_is_text(form: CallForm, text: str) -> None:
    assert read(form, list(text)) == (text, [])
