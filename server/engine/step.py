"""Who runs in a step, as data: what scheduler, engine and session tell one another.

Knows: rows, blocks as numbers. Does not know: why they were chosen, how they are run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quill.server.engine.sequence import Group, Row
from quill.server.outputs import FinishReason, PositionLogprobs, StepKind
from quill.server.request import Request
from quill.server.sampling.beam_search import Continuation, Search
from quill.server.sampling.native import Hidden


class Piece(NamedTuple):
    """Tokens of one text that a step reads."""

    ids: Sequence[int]
    start: int  # positions that are in its blocks before
    blocks: Sequence[int]
    wanted: Sequence[int]  # after which of the ids logits are needed, ascending
    source_blocks: Sequence[int] = ()
    source_length: int = 0
    hidden: Sequence[int] = ()  # after which of the ids hidden states are needed, ascending


class Source(NamedTuple):
    """What the encoder reads, from its first token to its last."""

    ids: Sequence[int]
    blocks: Sequence[int]


class BlockCopy(NamedTuple):
    source: int
    target: int


class Part(NamedTuple):
    """A piece, and who gets tokens from its logits."""

    piece: Piece
    group: Group
    row: Row
    takers: Sequence[Row]  # none while a prompt is read; at its end, all rows of the request
    guesses: Sequence[int] = ()  # the last of the ids: tokens that nobody has chosen yet
    is_forced: bool = False  # the guesses are all that the row's form allows
    reads: bool = True  # a prompt, or what was set back; not the last token of a running row


class Start(NamedTuple):
    """A request leaves the queue for the first time."""

    request: Request
    cached: int  # tokens that needn't be read


@dataclass(eq=False)
class Plan:
    """One step: copies first, then sources, then the pieces. Running rows are first of these."""

    running: list[Part] = field(default_factory=list)
    reading: list[Part] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    copying: list[Row] = field(default_factory=list)  # whose copies they are
    encoding: list[Group] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)

    @property
    def parts(self) -> list[Part]:
        return self.running + self.reading

    @property
    def sources(self) -> list[Source]:
        return [
            Source(group.request.source_ids or (), group.source_blocks) for group in self.encoding
        ]

    @property
    def kind(self) -> StepKind:
        if not self.reading:
            return "decode"
        return "mixed" if self.running else "prefill"

    @property
    def num_draft_tokens(self) -> int:
        return sum(len(part.guesses) for part in self.running)

    @property
    def num_read(self) -> int:
        """Tokens of prompts and sources."""
        num_sources = sum(group.request.num_prompt for group in self.encoding)
        return sum(len(part.piece.ids) for part in self.reading) + num_sources

    @property
    def num_tokens(self) -> int:
        return len(self.running) + self.num_draft_tokens + self.num_read


class Choice(NamedTuple):
    token: int
    logprobs: PositionLogprobs | None
    is_finite: bool  # the logits that it was chosen by; else it means nothing


Ranked = Mapping[str, Sequence[Continuation]]  # by request


class StepResult(NamedTuple):
    """What came of a plan."""

    choices: list[list[Choice]]  # for each part: one a taker, or one after each guess too
    hidden: list[Hidden]  # for each part: as many as its piece wanted
    ranked: Ranked  # what searches have instead
    prompt_logprobs: dict[str, list[PositionLogprobs]]  # by request
    broken: set[str]  # searches and scored prompts whose logits weren't finite
    masks_s: float | None = None  # what rows that keep to a form took; None: there were none


class Said(NamedTuple):
    row: Row
    token: int
    logprobs: PositionLogprobs | None


class Vector(NamedTuple):
    """A text was read whole."""

    row: Row
    vector_D: Hidden


class Finished(NamedTuple):
    row: Row
    reason: FinishReason


@dataclass(eq=False)
class Outcome:
    """What a step changed."""

    said: list[Said] = field(default_factory=list)
    vectors: list[Vector] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    found: list[Search] = field(default_factory=list)  # searches that are over
    broken: set[str] = field(default_factory=set)  # requests
    lost: set[str] = field(default_factory=set)  # requests whose form can't be followed any more
    num_accepted: int = 0  # guesses that were right
    num_jump_forward: int = 0  # of these: their form left no choice
