"""Who runs in a step, as data: what the scheduler tells the engine.

Knows: rows, slots as numbers. Does not know: why they were chosen, how they are run.
"""

from dataclasses import dataclass
from typing import NamedTuple

from server.events import FinishReason
from server.request import Request
from server.row import Row


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One slot reads some of a prompt's tokens."""

    request: Request
    rows: tuple[Row, ...]  # the answers that will start from this prompt
    slot: int
    start: int  # the chunk is prompt_ids[start:stop]
    stop: int
    cached: int  # positions that come from the prefix cache; the first chunk starts there

    @property
    def is_first(self) -> bool:
        return self.start == self.cached

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.request.prompt_ids)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Every running row reads its last token. Row i is in slot i."""

    rows: tuple[Row, ...]


Plan = PrefillPlan | DecodePlan


class Copy(NamedTuple):
    """The first `length` positions of a slot go into another."""

    source: int
    target: int
    length: int


class Finished(NamedTuple):
    row: Row
    reason: FinishReason


class Outcome(NamedTuple):
    """What a step changed. The copies are to be made in order, before the next step."""

    finished: list[Finished]
    copies: list[Copy]
