"""Speculative decoding by prompt lookup (n-grams), and the jump-forward tokens of grammars.

Knows: a sequence's tokens, how often its draft tokens were accepted, what a draft token costs.
Does not know: logits, other sequences, clocks.

The longest n-gram before a text's end that occurred earlier is looked up; what followed it there
becomes the draft. A step verifies the draft: the token at each position depends on logits, seed and
position alone, so a draft token is accepted or rejected and never changes an answer.
"""

import math
from array import array
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a sequence has its lookup
    from quill.server.engine.block_pool import BlockTables
    from quill.server.engine.sequence import Sequence
    from quill.server.engine.step_budget import StepBudget
    from quill.server.request import Limits

MAX_DRAFT = 8
MAX_STEP_DRAFT = 64  # in a step, or one for each sequence: each has logits
MAX_STEP_COMPUTED = 1024  # jump-forward tokens: who comes after them waits for another step
NGRAM = 3  # tokens that must have occurred together before
LONG = 6  # a match of so many tokens is trusted sooner
MAX_MATCH = 16
NUM_PLACES = 6  # earlier places that are looked at
LEARNING = 0.2
FIRST_RATES = (0.35, 0.7)  # of acceptance, after short and long matches, before any is known
RETRY = 32  # after so many drafts that didn't seem worth it, one is tried


class PromptLookup:
    """The text so far, indexed by its n-grams, and how often draft tokens were accepted."""

    def __init__(self, text: SequenceOf[int]) -> None:
        self._text = array("q", text)
        self._ends: dict[int, int] = {}  # by an n-gram's hash: where it last ended
        self._rates = list(FIRST_RATES)
        self._is_long = False  # the match of the last draft
        self._num_rests = 0
        # Most prompts are long, and this is done between two steps: 3 ms for 8,000 tokens.
        ends, earlier = self._ends, [0] * min(NGRAM - 1, len(text))
        for end, ngram in enumerate(zip(text, text[1:], text[2:], strict=False), NGRAM):
            key = hash(ngram)
            earlier.append(ends.get(key, 0))
            ends[key] = end
        self._earlier = array("q", earlier)  # for each place: where its n-gram ended before, or 0

    def append(self, token: int) -> None:
        self._text.append(token)
        key, end = hash(tuple(self._text[-NGRAM:])), len(self._text)
        self._earlier.append(self._ends.get(key, 0))
        self._ends[key] = end

    def draft(self, most: int, min_rate: float) -> list[int]:
        """At most so many tokens, each as likely accepted as `min_rate`."""
        place, length = self._longest_match()
        if not place or most <= 0:
            return []
        self._is_long = length >= LONG
        num = self._num_worthwhile(self._rates[self._is_long], min_rate)
        if not num:
            self._num_rests += 1
            if self._num_rests < RETRY:
                return []
            self._num_rests, num = 0, 1
        num = min(num, most, MAX_DRAFT)
        following = self._text[place : place + num].tolist()
        for i in range(len(following), num):  # the text repeats itself
            following.append(following[i - (len(self._text) - place)])
        return following

    def learn(self, num_draft_tokens: int, num_accepted: int) -> None:
        """From the last draft: tokens after the first rejected one tell nothing."""
        rate = self._rates[self._is_long]
        for result in [1.0] * num_accepted + [0.0] * (num_accepted < num_draft_tokens):
            rate += LEARNING * (result - rate)
        self._rates[self._is_long] = rate

    def _num_worthwhile(self, rate: float, min_rate: float) -> int:
        """The i-th draft token is accepted if all before it are: rate ** i."""
        if rate < min_rate:
            return 0
        if min_rate <= 0 or rate >= 0.999:
            return MAX_DRAFT
        return int(math.log(min_rate) / math.log(rate))

    def _longest_match(self) -> tuple[int, int]:
        best = longest = 0
        place = self._earlier[-1] if self._earlier else 0
        for _ in range(NUM_PLACES):
            if not place or longest == MAX_MATCH:
                break
            length = self._match(place)
            if length > longest:
                best, longest = place, length
            place = self._earlier[place - 1]
        return best, longest

    def _match(self, place: int) -> int:
        """How many tokens before `place` are those before the text's end."""
        text, end, length = self._text, len(self._text), NGRAM
        while length < min(place, MAX_MATCH) and text[place - length - 1] == text[end - length - 1]:
            length += 1
        return length


class Speculation:
    """How many tokens of which kind each sequence of a step speculates with."""

    def __init__(self, limits: "Limits", budget: "StepBudget", blocks: "BlockTables") -> None:
        self._is_on = limits.speculative
        self._budget = budget
        self._blocks = blocks
        self._num_reserved = 0  # blocks that drafts leave free
        self._max_each = 0
        self._min_rate = 0.0
        self._num_jump_forward = 0  # tokens that the step may still have
        self._num_computed = 0  # for them, in this step

    def begin_step(self, num_decoding: int, num_seqs: int, has_prefill: bool) -> None:
        if not self._is_on:
            return
        self._num_reserved = num_seqs  # no sequence is preempted for a draft
        self._max_each = max(1, MAX_STEP_DRAFT // max(1, num_decoding))
        self._min_rate = self._budget.min_acceptance(num_decoding)
        # The running sequences wait for prompts or for grammars, and not for both.
        jump_forward = 0 if has_prefill else self._budget.num_jump_forward(num_decoding)
        self._num_jump_forward = jump_forward
        self._num_computed = 0

    def draft(self, sequence: "Sequence") -> tuple[list[int], bool]:
        """Draft tokens, and whether they are all that the sequence's grammar allows."""
        if not self._is_on:
            return [], False
        most = min(sequence.max_tokens - len(sequence.token_ids) - 1, self._max_each)
        jump_forward = self._jump_forward(sequence, most)
        if jump_forward:
            self._num_jump_forward -= len(jump_forward)
            return jump_forward, True
        if sequence.lookup is None:
            sequence.lookup = PromptLookup(sequence.ids(0, sequence.num_tokens))
        min_rate = self._min_rate
        if min_rate > 0:  # the drafts of all sequences take no longer than the sequences
            most = min(most, max(1, int(1 / min_rate)))
        draft = sequence.lookup.draft(most, min_rate)
        return (self._fit(sequence, _allowed(sequence, draft)) if draft else draft), False

    def _jump_forward(self, sequence: "Sequence", most: int) -> list[int]:
        """The next tokens, as far as the grammar leaves no choice."""
        most = min(most, MAX_DRAFT, self._num_jump_forward)
        matcher = sequence.matcher
        if matcher is None or most <= 0 or self._num_computed >= MAX_STEP_COMPUTED:
            return []
        num_before, tokens = matcher.num_computed, matcher.jump_forward()
        self._num_computed += matcher.num_computed - num_before
        return self._fit(sequence, tokens[:most])

    def _fit(self, sequence: "Sequence", draft: list[int]) -> list[int]:
        """The draft tokens that there are blocks for."""
        size, pool = self._blocks.block_size, self._blocks.pool
        while len(sequence.blocks) * size < sequence.num_tokens + len(draft):
            if pool.num_free <= self._num_reserved:
                return draft[: len(sequence.blocks) * size - sequence.num_tokens]
            sequence.blocks.append(pool.take())
        return draft


def _allowed(sequence: "Sequence", draft: list[int]) -> list[int]:
    """The draft as far as the grammar allows it."""
    if sequence.matcher is None:
        return draft
    # Nothing follows a stop id, so the matcher isn't asked what could.
    stop_ids = sequence.request.all_stop_ids
    stops = (place for place, token in enumerate(draft) if token in stop_ids)
    draft = draft[: next(stops, len(draft))]
    return draft[: sequence.matcher.num_allowed(draft)]
