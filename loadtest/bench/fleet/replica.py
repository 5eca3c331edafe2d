"""A server without a model: the real scheduler, and steps that take as long as they would.

Knows: the scheduler, what steps cost. Does not know: the time, other replicas, who asks.
"""

from dataclasses import dataclass, field

import numpy as np

from quill.server.engine.scheduler import Scheduler
from quill.server.engine.step import Choice, Plan, StepResult
from quill.server.limits import Limits
from quill.server.request import Request

_NO_HIDDEN = np.zeros((0, 1), np.float32)
_TOKEN = [Choice(0, None, is_finite=True)]


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of a step, as a line through what an engine needs.

    As it stands: SmolLM2-135M in quill4 on two cores of an EPYC (RESULTS.md, "Blocks in place of
    slots"): 160, 651 and 828 tokens/s with 1, 8 and 32 rows, 1,279 and 1,014 of prompts of 128 and
    512 tokens. The line gives 165, 598, 829, 1,059 and 1,100.
    """

    step_ms: float = 5.0
    row_ms: float = 1.05
    prompt_token_ms: float = 0.9

    def seconds(self, plan: Plan) -> float:
        rows_ms = self.row_ms * len(plan.running)
        return (self.step_ms + rows_ms + self.prompt_token_ms * plan.num_read) / 1000


@dataclass
class StepEnd:
    """Requests, by what a step came to for them."""

    begun: list[str] = field(default_factory=list)  # have their first token
    finished: list[str] = field(default_factory=list)


class Replica:
    """`begin_step` and `end_step` take turns, and the time between them is told by the first."""

    def __init__(self, limits: Limits, cost: StepCost, max_waiting: int) -> None:
        self._limits, self._cost, self._max_waiting = limits, cost, max_waiting
        self._plan: Plan | None = None
        self._scheduler = Scheduler(limits)
        self.slowness = 1.0
        self.busy_s = 0.0
        self.num_prompt = 0
        self.num_cached = 0

    @property
    def is_stepping(self) -> bool:
        return self._plan is not None

    def add(self, request: Request) -> bool:
        """False: its queue is full."""
        if self._scheduler.num_waiting >= self._max_waiting:
            return False
        self._scheduler.add(request)
        return True

    def begin_step(self) -> float | None:
        """How many seconds it takes. None: there is nothing to do."""
        self._plan = self._scheduler.plan()
        if self._plan is None:
            return None
        for start in self._plan.starts:
            self.num_prompt += start.request.num_prompt
            self.num_cached += start.cached
        seconds = self._cost.seconds(self._plan) * self.slowness
        self._scheduler.note(self._plan, seconds)
        self.busy_s += seconds
        return seconds

    def end_step(self) -> StepEnd:
        plan, self._plan = self._plan, None
        assert plan is not None
        choices = [_TOKEN if part.takers else [] for part in plan.parts]
        hidden = [_NO_HIDDEN] * len(plan.parts)
        outcome = self._scheduler.commit(plan, StepResult(choices, hidden, {}, {}, set()))
        begun = [
            each.row.request.request_id for each in outcome.said if len(each.row.token_ids) == 1
        ]
        return StepEnd(begun, [each.row.request.request_id for each in outcome.finished])

    def restart(self) -> None:
        """All that it had is gone."""
        self._scheduler, self._plan = Scheduler(self._limits), None
