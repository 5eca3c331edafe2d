"""Masks say what may follow, whatever draft tokens were tried in between."""

import json
import math
import random
import re

import llguidance
import numpy as np
import numpy.typing as npt
import pytest

from quill.server.errors import InvalidFieldError
from quill.server.grammar import compiler
from quill.server.grammar import matcher as matcher_module
from quill.server.grammar.compiler import Compiler
from quill.server.grammar.matcher import MAX_COMPUTED, MAX_JUMP_FORWARD, TokenMatcher
from quill.server.request import Constraint
from tests.server.fake_session import VOCAB_SIZE
from tests.server.small_grammars import (
    EOS,
    GRAMMARS,
    PIECES,
    small_grammar,
    small_tokenizer,
    text_of,
)

Mask = npt.NDArray[np.uint32]


def tokens_in(mask: Mask) -> list[int]:
    bits = np.unpackbits(mask.view(np.uint8), count=VOCAB_SIZE, bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def allowed(matcher: TokenMatcher) -> list[int]:
    (mask,) = matcher.masks((), (), 0)
    assert not matcher.has_failed
    return tokens_in(mask)


def walk(matcher: TokenMatcher, rng: random.Random, most: int = 80) -> list[int]:
    """A random answer that keeps to the grammar."""
    tokens: list[int] = []
    while len(tokens) < most:
        tokens.append(rng.choice(allowed(matcher)))
        if tokens[-1] == EOS:
            break
        matcher.accept(tokens[-1])
    return tokens


@pytest.mark.parametrize("seed", range(30))
def test_output_that_ends_by_itself_is_a_whole_document(seed: int) -> None:
    rng = random.Random(seed)
    for name in ("schema", "regex", "choice"):
        kind, asked = GRAMMARS[name]
        tokens = walk(small_grammar(kind, asked).matcher(), rng)
        assert tokens[-1] == EOS
        text = text_of(tokens)
        if name == "regex":
            assert re.fullmatch(asked, text)
        elif name == "choice":
            assert text in json.loads(asked)
        else:
            document = json.loads(text)
            assert 0 <= document["a"] <= 300
            assert document["b"] in ("ab", "trust", None)
            assert all(isinstance(each, bool) for each in document.get("c", []))


@pytest.mark.parametrize("name", GRAMMARS)
def test_draft_tokens_leave_no_trace_and_have_the_masks_of_accepted_ones(name: str) -> None:
    grammar, rng = small_grammar(*GRAMMARS[name]), random.Random(name)
    for _ in range(20):
        tokens = walk(grammar.matcher(), rng, 30)
        tokens = tokens[:-1] if tokens[-1] == EOS else tokens
        matcher = grammar.matcher()
        for place in range(len(tokens)):
            drafts = tokens[place : place + rng.randint(0, 5)]
            wild = [*drafts[:2], rng.randrange(VOCAB_SIZE)]
            assert matcher.num_allowed(drafts) == len(drafts)
            assert matcher.num_allowed(wild) >= min(2, len(drafts))
            masks = matcher.masks(drafts, (), 0)
            other = grammar.matcher()
            for token in tokens[:place]:
                other.accept(token)
            for mask, draft in zip(masks, [*drafts, None], strict=True):
                assert tokens_in(mask) == allowed(other)
                if draft is not None:
                    other.accept(draft)
            if rng.random() < 0.5:
                forced = matcher.jump_forward()
                assert matcher.num_allowed(forced) == len(forced)
                for mask, token in zip(matcher.masks(forced, (), 0), forced, strict=False):
                    assert tokens_in(mask) == [token]
            matcher.accept(tokens[place])


def test_stop_ids_are_masked_where_there_is_anything_else() -> None:
    matcher = small_grammar("regex", "a{1,3}").matcher()
    (a,) = allowed(matcher)
    masks = matcher.masks([a, a, a], {EOS}, 3)
    assert [tokens_in(mask) for mask in masks] == [[a], [a], [a], [EOS]]
    masks = matcher.masks([a, a, a], {EOS}, 2)
    assert [tokens_in(mask) for mask in masks] == [[a], [a], [EOS, a], [EOS]]
    masks = matcher.masks([a, a, a], {EOS, a}, 9)
    assert [tokens_in(mask) for mask in masks] == [[a], [EOS, a], [EOS, a], [EOS]]


def test_forbidden_token_fails_its_own_sequence_only() -> None:
    grammar = small_grammar(*GRAMMARS["choice"])
    matcher, other = grammar.matcher(), grammar.matcher()
    matcher.accept(EOS - 1)
    assert matcher.has_failed
    assert not matcher.jump_forward()
    assert not matcher.masks((), (), 0).any()
    assert not other.has_failed
    assert len(allowed(other)) > 1


def test_draft_token_at_which_the_lexer_fails_is_dropped() -> None:
    matcher = small_grammar("regex", "[ab]{1,9}").matcher()
    (first, *_) = allowed(matcher)
    matcher.accept(first)
    before = allowed(matcher)
    masks = matcher.masks([before[-1], EOS - 1, before[-1]], (), 0)
    assert len(masks) == 2
    assert tokens_in(masks[0]) == before == allowed(matcher)
    matcher.accept(before[-1])
    assert not matcher.has_failed


def test_sequences_that_share_a_grammar_are_followed_as_far_as_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each can be followed as far as if it were alone, and the next one has a new grammar."""
    limits = llguidance.LLParserLimits(max_lexer_states=300, verbose_errors=False)
    monkeypatch.setattr(compiler, "LIMITS", limits)
    monkeypatch.setattr(matcher_module, "MAX_RENEWAL_S", math.inf)
    asked = Constraint("regex", "([a-g]*a){3}[a-g]{12}b[a-g]{0,40}")
    own = Compiler(small_tokenizer(), VOCAB_SIZE, [EOS])
    shared = own.compile_now(asked)
    generated = [walk(shared.matcher(), random.Random(seed), 60) for seed in range(12)]
    assert shared.is_worn_out
    new = own.compile_now(asked)
    assert new is not shared
    assert own.compile_now(asked) is new
    for seed, tokens in enumerate(generated):
        alone = Compiler(small_tokenizer(), VOCAB_SIZE, [EOS]).compile_now(asked).matcher()
        assert walk(alone, random.Random(seed), 60) == tokens


def test_grammar_that_is_slow_to_make_is_not_made_again_between_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = llguidance.LLParserLimits(max_lexer_states=100, verbose_errors=False)
    monkeypatch.setattr(compiler, "LIMITS", limits)
    monkeypatch.setattr(matcher_module, "MAX_RENEWAL_S", 0.0)
    own = Compiler(small_tokenizer(), VOCAB_SIZE, [EOS])
    grammar = own.compile_now(Constraint("regex", "([a-g]*a){3}[a-g]{12}b[a-g]{0,40}"))
    matcher, rng = grammar.matcher(), random.Random(0)
    with pytest.raises(AssertionError):
        walk(matcher, rng, 60)
    assert matcher.has_failed
    assert grammar.is_worn_out
    assert not matcher.masks((), (), 0).any()
    matcher.accept(0)
    assert not matcher.jump_forward()
    assert matcher.num_allowed([0]) == 0


def test_long_jump_forward_is_computed_once() -> None:
    matcher = small_grammar("regex", "a{300}(b|c)").matcher()
    first = matcher.jump_forward()
    assert len(first) == MAX_JUMP_FORWARD
    for _ in range(200):
        (token, *_) = matcher.jump_forward()
        assert allowed(matcher) == [token]
        matcher.accept(token)
    other = small_grammar("regex", "a{300}(b|c)").matcher()
    for _ in range(200):
        other.accept(first[0])
    assert matcher.jump_forward() == other.jump_forward()


def test_grammar_that_determines_too_many_tokens_at_once_is_not_asked_again() -> None:
    grammar = Compiler(small_tokenizer(), VOCAB_SIZE, [EOS]).compile_now(
        Constraint("regex", f"[bc](ad){{{MAX_COMPUTED}}}")
    )
    first, second = grammar.matcher(), grammar.matcher()
    for matcher in (first, second):
        matcher.accept(PIECES.index("b"))
    assert len(first.jump_forward()) == MAX_JUMP_FORWARD
    assert not grammar.jumps
    assert second.jump_forward() == []
    (mask,) = second.masks((), (), 0)
    assert mask.any()


def test_text_without_a_choice_is_limited() -> None:
    with pytest.raises(InvalidFieldError, match="tokens without a choice"):
        small_grammar("regex", "(ad){50000}")
