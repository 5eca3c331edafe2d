"""What a text's own past says about how it goes on."""

import random

from quill.server.engine.speculation import MAX_DRAFT, RETRY, PromptLookup


def test_what_followed_the_longest_match_is_drafted() -> None:
    text = [1, 2, 3, 4, 5, 90, 91, 0, 2, 3, 4, 5, 80, 81, 0, 1, 2, 3, 4, 5]
    assert PromptLookup(text).draft(2, 0.1) == [90, 91]


def test_text_without_repetitions_is_not_drafted() -> None:
    assert PromptLookup([1, 2, 3, 4, 1, 2, 5, 6, 1, 2]).draft(8, 0.0) == []
    assert PromptLookup([]).draft(8, 0.0) == []
    assert PromptLookup([1]).draft(8, 0.0) == []


def test_text_that_goes_round_is_drafted_beyond_its_end() -> None:
    assert PromptLookup([7, 1, 2, 1, 2, 1, 2, 1]).draft(8, 0.0) == [2, 1] * 4
    assert PromptLookup([5, 5, 5, 5]).draft(3, 0.0) == [5, 5, 5]


def test_tokens_that_come_later_are_indexed_too() -> None:
    lookup = PromptLookup([1, 2, 3])
    for token in (4, 5, 9, 1, 2, 3):
        lookup.append(token)
    assert lookup.draft(2, 0.0) == [4, 5]


def test_fewer_are_drafted_where_draft_tokens_cost_more() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 7, 8, 9, 10] * 2)
    lengths = [len(lookup.draft(8, rate)) for rate in (0.0, 0.1, 0.4, 0.9)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == MAX_DRAFT
    assert lengths[-1] == 0


def test_sequence_whose_drafts_are_rejected_is_left_in_peace_and_tried_now_and_then() -> None:
    rng = random.Random(1)
    lookup = PromptLookup([0, 1, 2] * 4)
    num_steps = num_draft_tokens = 0
    for _ in range(400):
        found = lookup.draft(8, 0.15)
        num_draft_tokens += len(found)
        if found:
            lookup.learn(len(found), 0)
        num_steps += 1
        for token in (rng.randrange(3, 99), 0, 1, 2):
            lookup.append(token)
    assert 1 < num_draft_tokens < 30 + num_steps / RETRY


def test_sequence_whose_drafts_are_accepted_is_trusted_more_and_more() -> None:
    lookup = PromptLookup([0, 1, 2, 3, 4] * 2)
    for _ in range(30):
        found = lookup.draft(8, 0.3)
        lookup.learn(len(found), len(found))
    assert len(lookup.draft(8, 0.3)) == MAX_DRAFT
    assert len(lookup.draft(3, 0.3)) == 3
