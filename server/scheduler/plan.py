"""Who runs in a step, as data: what the scheduler tells the engine.

Knows: rows, slots as numbers. Does not know: why they were chosen, how they are run.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from quill.server.events import FinishReason, StepKind
from quill.server.request import Request
from quill.server.sampling.beam_search import Search
from quill.server.scheduler.row import Row


class Start(NamedTuple):
    """A request leaves the queue."""

    request: Request
    cached: int  # tokens that needn't be read


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One slot reads some of a prompt's tokens."""

    kind: ClassVar[StepKind] = "prefill"
    request: Request
    rows: tuple[Row, ...]  # the answers that will start from this prompt
    slot: int
    start: int  # the chunk is prompt_ids[start:stop]
    stop: int
    cached: int  # positions that come from the prefix cache; the first chunk starts there

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def is_first(self) -> bool:
        return self.start == self.cached

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.request.prompt_ids)

    @property
    def starts(self) -> tuple[Start, ...]:
        return (Start(self.request, self.cached),) if self.is_first else ()


class Encoding(NamedTuple):
    """One source is read into one slot."""

    request: Request
    rows: tuple[Row, ...]  # the answers that will start from it
    slot: int


@dataclass(frozen=True, slots=True)
class EncodePlan:
    """The encoder reads some sources, one after another. Each into the next slot."""

    kind: ClassVar[StepKind] = "prefill"  # to those who measure: it is what a first token waits for
    encodings: tuple[Encoding, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(row for each in self.encodings for row in each.rows)

    @property
    def num_tokens(self) -> int:
        return sum(each.request.num_prompt for each in self.encodings)

    @property
    def starts(self) -> tuple[Start, ...]:
        return tuple(Start(each.request, 0) for each in self.encodings)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Every running row reads its last token. Row i is in slot i."""

    kind: ClassVar[StepKind] = "decode"
    starts: ClassVar[tuple[Start, ...]] = ()
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.rows)


Plan = PrefillPlan | EncodePlan | DecodePlan


class Copy(NamedTuple):
    """Positions of a slot, from `start` to before `stop`, go into the same places of another."""

    source: int
    target: int
    stop: int
    start: int = 0
    with_source: bool = False  # what the encoder parked in the slot goes along, if there is one


class Finished(NamedTuple):
    row: Row
    reason: FinishReason


class Outcome(NamedTuple):
    """What a step changed. The copies are to be made in order, before the next step."""

    finished: list[Finished]
    copies: list[Copy]
    found: list[Search]  # searches that are over
