"""Forms become grammars, or are refused in words and in time."""

import asyncio
import contextlib
import json
import time
from typing import Any, cast

import pytest

from quill.loadtest.workload.hostile_forms import hostile_forms
from quill.server.errors import InvalidFieldError
from quill.server.grammar import compiler
from quill.server.grammar.compiler import MAX_BYTES, Compiler, Form, Kind
from quill.server.grammar.nesting import MAX_DEPTH
from tests.server.fake_session import VOCAB_SIZE
from tests.server.running import make_grammars
from tests.server.small_grammars import EOS, GRAMMARS, small_compiler, small_tokenizer

ENDLESS = '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}'
LAUGHS = "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(40)) + '\na40: "ab"'


def refusal(kind: Kind, text: str) -> str:
    with pytest.raises(InvalidFieldError) as caught:
        asyncio.run(small_compiler().compile(Form(kind, text)))
    assert caught.value.field == f"constraint.{kind}"
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "text", "place"),
    [
        ("json_schema", '{"type": ', "line 1 column 10"),
        ("json_schema", '{"type": "strin"}', "strin"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}', "not"),
        ("json_schema", "[]", "a JSON object"),
        ("json_schema", '{"$ref": "http://127.0.0.1/x"}', "not present"),
        (
            "json_schema",
            '{"type": "object", "properties": {"a": false}, "required": ["a"]}',
            "unsatisfiable",
        ),
        ("json_schema", '{"$ref": "#"}', "no text satisfies it"),
        ("json_schema", ENDLESS, "has no end"),
        ("lark", LAUGHS, "has no end"),
        ("regex", "a(b", "unclosed group"),
        ("lark", "start: foo", "1(8)"),
        ("lark", 'root ::= "a', "line 1"),
        ("regex", "a" * (MAX_BYTES + 1), "has 65537 bytes"),
        ("regex", "", "is empty"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_with_its_place(
    kind: Kind, text: str, place: str
) -> None:
    assert place in refusal(kind, text)


@pytest.mark.parametrize("name", hostile_forms())
def test_hostile_forms_are_refused_or_followed_and_hold_nobody_up(name: str) -> None:
    form = hostile_forms()[name]
    kind = cast(Kind, form.WhichOneof("kind"))
    started_s = time.process_time()
    with contextlib.suppress(InvalidFieldError):
        matcher = small_compiler().compile_now(Form(kind, getattr(form, kind))).matcher()
        for _ in range(20):
            (mask,) = matcher.masks((), (), 0)
            if matcher.has_failed:
                break
            matcher.accept(int(mask[0]).bit_length() - 1)
            matcher.forced()
    assert time.process_time() - started_s < 1


@pytest.mark.parametrize("depth", [MAX_DEPTH // 2, MAX_DEPTH])
def test_levels_are_counted(depth: int) -> None:
    def nested(depth: int) -> str:
        return '{"items": ' * depth + "{}" + "}" * depth

    small_compiler().compile_now(Form("json_schema", nested(depth - 1)))
    assert f"more than {MAX_DEPTH}" in refusal("json_schema", nested(MAX_DEPTH))


@pytest.mark.parametrize(
    "regex", ["((a{1,1000}){1,1000}){1,1000}", "(.*a){50}.{200}", "(a|b)*a(a|b){20}"]
)
def test_bombs_are_followed_or_lost_and_hold_nobody_up(regex: str) -> None:
    matcher = small_compiler().compile_now(Form("regex", regex)).matcher()
    for _ in range(50):
        started_s = time.process_time()
        matcher.masks((), (), 0)
        assert time.process_time() - started_s < 0.5
        if matcher.has_failed:
            break
        matcher.accept(2)  # an a


def test_grammars_are_kept_by_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Compiler(small_tokenizer(), VOCAB_SIZE, [EOS])
    forms = [Form(*form) for form in GRAMMARS.values()]

    async def compile(form: Form) -> Any:
        return await own.compile(form)

    first = asyncio.run(compile(forms[0]))
    assert asyncio.run(compile(Form(*GRAMMARS["schema"]))) is first
    assert own.compile_now(Form("regex", forms[2].text + "a")) is not first
    monkeypatch.setattr(compiler, "MAX_CACHED", 2)
    for form in forms[1:]:
        own.compile_now(form)
    assert len(own._cache._grammars) == 2
    assert own.compile_now(forms[0]) is not first
    monkeypatch.setattr(compiler, "MAX_CACHED_BYTES", 3)
    own.compile_now(Form("regex", "ab"))
    assert own._cache._num_bytes == 2
    assert len(own._cache._grammars) == 1


def test_one_that_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_COMPILE_S", 0.0)
    assert "takes longer than 0 s" in refusal("regex", "a{1,77}")


def test_a_reload_makes_no_second_tokenizer_of_the_same() -> None:
    one, same = (Compiler(small_tokenizer(), VOCAB_SIZE, [EOS]) for _ in range(2))
    assert one._tokenizer is same._tokenizer
    assert Compiler(small_tokenizer(), VOCAB_SIZE, [EOS, 0])._tokenizer is not one._tokenizer


def test_a_tokenizer_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"."):
        Compiler('{"model": {}}', VOCAB_SIZE, [EOS])


@pytest.mark.parametrize("texts", [[f"item {n:04}" for n in range(1024)], ["ab", "a"] * 512])
def test_choices_may_begin_alike_or_be_alike(texts: list[str]) -> None:
    make_grammars().compile_now(Form("choice", json.dumps(texts)))
