"""A server without a model: the real scheduler, and steps that take as long as they would.

Knows: the scheduler, what steps cost. Does not know: the time, other replicas, who asks.
"""

from dataclasses import dataclass, field

import numpy as np

from quill.server.engine.scheduler import Scheduler
from quill.server.engine.step import Choice, SchedulerOutput, StepOutput
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

    def seconds(self, scheduled: SchedulerOutput) -> float:
        rows_ms = self.row_ms * len(scheduled.decode)
        return (self.step_ms + rows_ms + self.prompt_token_ms * scheduled.num_prefill_tokens) / 1000


@dataclass
class StepEnd:
    """Requests, by what a step came to for them."""

    begun: list[str] = field(default_factory=list)  # have their first token
    finished: list[str] = field(default_factory=list)


class Replica:
    """`begin_step` and `end_step` take turns, and the time between them is told by the first."""

    def __init__(self, limits: Limits, cost: StepCost, max_waiting: int) -> None:
        self._limits, self._cost, self._max_waiting = limits, cost, max_waiting
        self._scheduled: SchedulerOutput | None = None
        self._scheduler = Scheduler(limits)
        self.slowness = 1.0
        self.busy_s = 0.0
        self.num_prompt = 0
        self.num_cached = 0

    @property
    def is_stepping(self) -> bool:
        return self._scheduled is not None

    def add(self, request: Request) -> bool:
        """False: its queue is full."""
        if self._scheduler.num_waiting >= self._max_waiting:
            return False
        self._scheduler.add(request)
        return True

    def begin_step(self) -> float | None:
        """How many seconds it takes. None: there is nothing to do."""
        self._scheduled = self._scheduler.schedule()
        if self._scheduled is None:
            return None
        for group in self._scheduled.started:
            self.num_prompt += group.request.num_prompt
            self.num_cached += group.num_cached
        seconds = self._cost.seconds(self._scheduled) * self.slowness
        self._scheduler.observe(self._scheduled, seconds)
        self.busy_s += seconds
        return seconds

    def end_step(self) -> StepEnd:
        scheduled, self._scheduled = self._scheduled, None
        assert scheduled is not None
        choices = [_TOKEN if each.to_sample else [] for each in scheduled.chunks]
        hidden = [_NO_HIDDEN] * len(scheduled.chunks)
        output = StepOutput(choices, hidden, {}, {})
        self._scheduler.update(scheduled, output)
        begun = [
            each.group.request_id
            for each in scheduled.chunks
            if each.to_sample and len(each.sequence.token_ids) == 1
        ]
        return StepEnd(begun, [each.request.request_id for each in output.finished])

    def restart(self) -> None:
        """All that it had is gone."""
        self._scheduler, self._scheduled = Scheduler(self._limits), None
