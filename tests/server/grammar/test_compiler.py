"""Constraints become grammars, or errors that say why, in time."""

import contextlib
import json
from typing import cast

import pytest

from quill.loadtest.workload.constraints import adversarial_constraints
from quill.server.errors import InvalidFieldError
from quill.server.grammar import compiler
from quill.server.grammar.compiler import Compiler
from quill.server.grammar.json_schema import MAX_DEPTH
from quill.server.request import MAX_CONSTRAINT_BYTES, Constraint, ConstraintKind
from tests.processor_time import within_s
from tests.server.fake_session import VOCAB_SIZE
from tests.server.scripted_session import TIMEOUT_S
from tests.server.small_grammars import EOS, GRAMMARS, byte_grammar, small_compiler, small_tokenizer

ENDLESS = '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}'
LAUGHS = "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(40)) + '\na40: "ab"'


def error_of(kind: ConstraintKind, text: str) -> str:
    with pytest.raises(InvalidFieldError) as caught:
        small_compiler().compile_now(Constraint(kind, text))
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
        ("regex", "ab<eos>", "the added token <eos> (id 1)"),
        ("choice", '["a", "b<eos>"]', "the added token <eos> (id 1)"),
        ("lark", 'start: <[1]> "a<eos>"', "the added token <eos> (id 1)"),
        ("regex", "a(b", "unclosed group"),
        ("lark", "start: foo", "1(8)"),
        ("lark", 'root ::= "a', "line 1"),
        ("regex", "a" * (MAX_CONSTRAINT_BYTES + 1), "has 65537 bytes"),
        ("regex", "", "is empty"),
    ],
)
def test_error_says_what_is_wrong_and_where(kind: ConstraintKind, text: str, place: str) -> None:
    assert place in error_of(kind, text)


@pytest.mark.parametrize("name", adversarial_constraints())
def test_adversarial_constraints_are_errors_or_followed_in_time(name: str) -> None:
    asked = adversarial_constraints()[name]
    kind = cast(ConstraintKind, asked.WhichOneof("kind"))
    with within_s(1), contextlib.suppress(InvalidFieldError):
        matcher = small_compiler().compile_now(Constraint(kind, getattr(asked, kind))).matcher()
        for _ in range(20):
            (mask,) = matcher.masks((), (), 0)
            if matcher.has_failed:
                break
            matcher.accept(int(mask[0]).bit_length() - 1)
            matcher.jump_forward()


@pytest.mark.parametrize("depth", [MAX_DEPTH // 2, MAX_DEPTH])
def test_depth_is_limited(depth: int) -> None:
    def nested(depth: int) -> str:
        return '{"items": ' * depth + "{}" + "}" * depth

    small_compiler().compile_now(Constraint("json_schema", nested(depth - 1)))
    assert f"more than {MAX_DEPTH}" in error_of("json_schema", nested(MAX_DEPTH))


@pytest.mark.parametrize(
    "regex", ["((a{1,1000}){1,1000}){1,1000}", "(.*a){50}.{200}", "(a|b)*a(a|b){20}"]
)
def test_regex_bombs_are_followed_or_fail_in_time(regex: str) -> None:
    matcher = small_compiler().compile_now(Constraint("regex", regex)).matcher()
    for _ in range(50):
        with within_s(0.5):
            matcher.masks((), (), 0)
        if matcher.has_failed:
            break
        matcher.accept(2)  # an a


def test_grammars_are_cached_by_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Compiler(small_tokenizer(), VOCAB_SIZE, [EOS])
    asked = [Constraint(*each) for each in GRAMMARS.values()]

    first = own.start(asked[0], "").result(TIMEOUT_S)
    with monkeypatch.context() as patched:  # a constraint that is cached isn't parsed
        patched.setattr(compiler, "source_of", None)
        assert own.start(Constraint(*GRAMMARS["schema"]), "").result(0) is first
        assert own.cached(asked[0]) is first
        assert own.cached(Constraint("json_schema", asked[0].text + " ")) is None
        assert own.cached(Constraint("lark", asked[0].text)) is None
    monkeypatch.setattr(compiler, "MAX_CACHED", 2)
    for each in asked[1:]:
        own.compile_now(each)
    assert [each for each in asked if own.cached(each)] == asked[-2:]
    assert own.compile_now(asked[0]) is not first
    monkeypatch.setattr(compiler, "MAX_CACHED_BYTES", 3)
    own.compile_now(Constraint("regex", "ab"))
    assert not any(map(own.cached, asked))
    assert own.cached(Constraint("regex", "ab"))


def test_reload_keeps_the_same_tokenizer() -> None:
    one, same = (Compiler(small_tokenizer(), VOCAB_SIZE, [EOS]) for _ in range(2))
    assert one._tokenizer is same._tokenizer
    assert Compiler(small_tokenizer(), VOCAB_SIZE, [EOS, 0])._tokenizer is not one._tokenizer


def test_bad_tokenizer_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"."):
        Compiler('{"model": {}}', VOCAB_SIZE, [EOS])


@pytest.mark.parametrize("texts", [[f"item {n:04}" for n in range(1024)], ["ab", "a"] * 512])
def test_choices_may_share_prefixes_or_repeat(texts: list[str]) -> None:
    byte_grammar("choice", json.dumps(texts))
