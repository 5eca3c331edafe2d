"""One sequence that is being generated, one beam of a search, or one text that is only read; and
all those of one request.

Knows: a request, its tokens, blocks as numbers, when a row ends.
Does not know: the other requests, time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quill.server.constraint import Masks, Matcher
from quill.server.engine.speculation import Guesses
from quill.server.outputs import FinishReason
from quill.server.request import Pooling, Request
from quill.server.sampling.beam_search import Search
from quill.server.sampling.native import Hidden, Mask
from quill.server.sampling.penalties import Adjustments
from quill.server.sampling.sampler import Draw, sequence_seed


class Pooled:
    """One text, or some of its tokens. `num_seen` have come; they come in order, but some may come
    again."""

    def __init__(self, pooling: Pooling, of: range) -> None:
        self._of = {"mean": of, "first": of[:1], "last": of[-1:]}[pooling]
        self._sum_D: npt.NDArray[np.float64] | None = None
        self.num_seen = 0

    def wanted(self, start: int, stop: int) -> range:
        """Whose hidden states it needs, of the tokens that a step reads."""
        start = max(start, self.num_seen, self._of.start)
        return range(start, max(start, min(stop, self._of.stop)))

    def add(self, hidden_MD: Hidden, stop: int) -> None:
        """What was wanted of the tokens up to `stop`."""
        self.num_seen = max(self.num_seen, stop)
        if not len(hidden_MD):
            return
        rows_MD = hidden_MD.astype(np.float64)
        if self._sum_D is not None:
            rows_MD = np.concatenate([self._sum_D[None], rows_MD])
        # `sum` may add in another order; `accumulate` can't.
        self._sum_D = np.add.accumulate(rows_MD, axis=0)[-1]

    def vector_D(self) -> Hidden:
        """Once all of the text was read."""
        assert self._sum_D is not None
        return (self._sum_D / len(self._of)).astype(np.float32)


@dataclass(eq=False)
class Row:
    """One of a request's answers, or one of the texts that it has read. Two rows are never equal,
    whatever they hold."""

    request: Request
    sequence: int  # which of the request's answers, beams or texts, from 0
    seed: int
    max_tokens: int
    adjustments: Adjustments | None  # None: neither its sampling nor min_new_tokens want any
    matcher: Matcher | None = None  # where it is in the form that it keeps to
    token_ids: list[int] = field(default_factory=list)
    pooled: Pooled | None = None  # of a text that is read for its vector
    blocks: list[int] = field(default_factory=list)
    num_held: int = 0  # positions of its text that are in its blocks
    num_known: int = 0  # of its blocks: those that others may find
    guesses: Guesses | None = None
    num_draft_tokens: int = 0
    num_accepted: int = 0
    prompt_ids: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        reading = self.request.pooling
        self.prompt_ids = (
            self.request.prompt_ids if reading is None else reading.texts[self.sequence]
        )

    @property
    def num_text(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)

    def ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Some of its text: the prompt and the answer so far."""
        prompt = self.prompt_ids
        if stop <= len(prompt):
            return prompt[start:stop]
        return (*prompt[start:], *self.token_ids[max(0, start - len(prompt)) : stop - len(prompt)])

    @property
    def may_guess(self) -> bool:
        return not self.request.sampling.adjusts and self.request.beams is None

    def draw(self, ahead: int = 0, mask: Mask | None = None) -> Draw:
        """What the next token depends on, or the one after so many guesses."""
        sampling, position = self.request.sampling, len(self.token_ids) + ahead
        is_adjusted = sampling.adjusts or position < self.request.min_new_tokens
        adjustments = self.adjustments if is_adjusted else None
        return Draw(sampling, self.seed, position, adjustments, mask)

    def masks(self, guesses: Sequence[int]) -> Masks:
        """Which tokens may come next, and after each of the guesses."""
        assert self.matcher is not None
        num_unended = self.request.min_new_tokens - len(self.token_ids)
        return self.matcher.masks(guesses, self.request.ends, num_unended)

    def forced(self, most: int) -> list[int]:
        """What comes next, as far as its form leaves no choice."""
        return [] if self.matcher is None or most <= 0 else self.matcher.forced()[:most]

    def allowed(self, guesses: list[int]) -> list[int]:
        """As far as its form allows them."""
        if self.matcher is None or not guesses:
            return guesses
        # Nothing follows an end, so its matcher isn't asked what could.
        ends = (place for place, token in enumerate(guesses) if token in self.request.ends)
        guesses = guesses[: next(ends, len(guesses))]
        return guesses[: self.matcher.num_allowed(guesses)]

    @property
    def is_lost(self) -> bool:
        """The form that it keeps to can't be followed any more."""
        return self.matcher is not None and self.matcher.has_failed

    def add(self, token: int) -> None:
        self.token_ids.append(token)
        if self.adjustments is not None and self.request.sampling.adjusts:
            self.adjustments.add(token)
            if len(self.token_ids) == self.request.min_new_tokens and self.matcher is None:
                self.adjustments.allow(self.request.ends)
        if self.matcher is not None and token not in self.request.ends:
            self.matcher.accept(token)
        if self.guesses is not None:
            self.guesses.add(token)

    def finish_reason(self) -> FinishReason | None:
        """Why it is complete; None while it isn't."""
        last = self.token_ids[-1] if self.token_ids else None
        if last in self.request.eos_ids:
            return "eos"
        if last in self.request.stop_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_tokens else None


@dataclass(eq=False)
class Group:
    """A request that has left the queue, with its rows.

    Its first row reads the prompt; then all go on from there. After a preemption the prompt is read
    again, and then each row's tokens but the last, which is read with the next step.
    Of texts that are only read it has a row for each that is under way, and never none.
    """

    request: Request
    rows: list[Row]
    search: Search | None
    source_blocks: list[int] = field(default_factory=list)
    is_encoded: bool = False
    is_forked: bool = False  # the prompt is read, and all rows have it
    is_told: bool = False  # that it has started
    is_preempted: bool = False
    num_cached: int = 0  # of the prompt, when it started
    num_scored: int = 0  # of the prompt: positions whose logprobs were reported
    num_begun: int = 0  # texts that have had a row
    tag: float = 0.0  # its turn among those that are being read

    @property
    def is_new(self) -> bool:
        """No row has a token: the prompt's last logits are wanted."""
        return not self.rows[0].token_ids

    @property
    def scores(self) -> bool:
        return self.request.prompt_logprobs is not None and self.request.pooling is None

    @property
    def needs_all(self) -> bool:
        """Something comes of every token: nothing may be taken from others' blocks instead."""
        return self.scores or self.request.pooling is not None

    def num_noted(self, row: Row) -> int:
        """Of what `needs_all`: positions that something has come of already."""
        return self.num_scored if row.pooled is None else row.pooled.num_seen

    @property
    def num_rows(self) -> int:
        """How many of the server's rows it takes. Texts that are only read leave soon."""
        return len(self.rows) if self.request.pooling is None else 1

    def goal(self, row: Row) -> int:
        """Up to where a row is read before it runs."""
        return row.num_text - 1 if self.is_forked else len(row.prompt_ids)

    def own_rows(self) -> list[Row]:
        """Those with a text of their own; before the prompt is read there is one for all."""
        return self.rows if self.is_forked or self.request.pooling is not None else self.rows[:1]

    def readers(self) -> list[Row]:
        return [row for row in self.own_rows() if row.num_held < self.goal(row)]

    def next_text(self) -> tuple[int, ...] | None:
        """The next one that has no row yet. None: all have had one."""
        reading = self.request.pooling
        if reading is None or self.num_begun == len(reading.texts):
            return None
        return reading.texts[self.num_begun]

    def begin_text(self) -> None:
        """Gives the next text a row."""
        reading, text = self.request.pooling, self.next_text()
        assert reading is not None
        assert text is not None
        of = reading.ranges[self.num_begun] if reading.ranges else range(len(text))
        pooled = None if reading.masks else Pooled(reading.method, of)
        self.rows.append(Row(self.request, self.num_begun, 0, 0, None, pooled=pooled))
        self.num_begun += 1

    def running(self) -> list[Row]:
        """Those with one token to read. The beams of a search go on together."""
        if not self.is_forked:
            return []
        running = [row for row in self.rows if row.num_held == row.num_text - 1]
        return [] if self.search is not None and len(running) < len(self.rows) else running

    def drop_blocks(self) -> list[list[int]]:
        """Forgets all that was read; the blocks that it held, text by text."""
        dropped = [row.blocks for row in self.rows] + [self.source_blocks]
        for row in self.rows:
            row.blocks, row.num_held, row.num_known = [], 0, 0
        self.source_blocks, self.is_encoded = [], False
        self.is_forked = len(self.rows) == 1 and not self.is_new
        return dropped


def group_of(request: Request, context: int) -> Group:
    """A row for each answer, or for each beam. Prompt and answer together fit into the context."""
    if request.pooling is not None:
        group = Group(request, [], None)
        group.begin_text()
        return group
    max_tokens = min(request.max_new_tokens, context - len(request.prompt_ids))
    rows = [_row(request, sequence, max_tokens) for sequence in range(request.num_rows)]
    return Group(request, rows, None if request.beams is None else Search(request, max_tokens))


def _row(request: Request, sequence: int, max_tokens: int) -> Row:
    matcher = None if request.constraint is None else request.constraint.matcher()
    # A form's masks keep the ends out where they can.
    bans = request.min_new_tokens and matcher is None
    adjustments, banned = None, request.ends if bans else frozenset()
    if request.beams is None and (request.sampling.adjusts or banned):
        adjustments = Adjustments(request.sampling, request.prompt_ids, max_tokens, banned)
    seed = sequence_seed(request.seed, sequence)
    return Row(request, sequence, seed, max_tokens, adjustments, matcher)


# M tokens · D model size
