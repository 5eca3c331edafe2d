"""Serves requests, one step at a time: schedule, run, sample, update, publish.

Knows: the scheduler, the model's session, and the order in which they work.
Does not know: threads, gRPC, text. All of it runs in one thread, see
server/engine/engine_thread.py.
"""

import logging
import time
from collections.abc import Callable, Iterable

from quill.server.engine.block_pool import DiskCache
from quill.server.engine.model_runner import NOTHING_COMPUTED, ModelOutput, Session
from quill.server.engine.scheduler import Scheduler
from quill.server.engine.sequence import FINISHED, SequenceStatus
from quill.server.engine.step import (
    MaskThreads,
    SchedulerOutput,
    StepMasks,
    StepOutput,
    sample_step,
)
from quill.server.errors import (
    CancelledError,
    DeadlineError,
    InvalidFieldError,
    RequestError,
    StepError,
)
from quill.server.outputs import (
    EngineOutputs,
    Event,
    FailEvent,
    FinishReason,
    PromptEvent,
    QueueStats,
    StepStats,
)
from quill.server.request import Grammar, Limits, Request

logger = logging.getLogger(__name__)

MAX_FAILURES = 3  # steps that may fail one after another before the engine is broken


class Engine:
    """Requests come by `submit` and go by `end`; each `step` returns what became of them."""

    def __init__(
        self,
        session: Session,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        disk: DiskCache | None = None,
    ) -> None:
        self._limits = limits
        self._session = session
        self._masks = MaskThreads()
        self._scheduler = Scheduler(limits, disk)
        self._clock = clock
        self._events: list[Event] = []
        self._num_failures = 0
        self._scheduled: SchedulerOutput | None = None  # what runs; read from other threads, too

    @property
    def is_idle(self) -> bool:
        """There is no request, and no event to publish."""
        return not self._events and self._scheduler.is_empty

    @property
    def is_broken(self) -> bool:
        """Step after step fails. The engine goes on trying; one success makes it whole again."""
        return self._num_failures >= MAX_FAILURES

    def describe(self) -> str:
        """What it is doing, for people. From any thread."""
        scheduled = self._scheduled
        if scheduled is None:
            return "between two runs of the model"
        requests = ", ".join(sorted({each.group.request_id for each in scheduled.chunks}))
        kind, num_tokens = scheduled.kind, scheduled.num_tokens
        return f"a {kind} step of {num_tokens} tokens for the requests {requests}"

    def fits(self, request: Request) -> bool:
        """Whether it can ever be served; others mustn't be submitted. From any thread."""
        return self._limits.fits(request)

    def submit(self, request: Request, arrived_s: float, grammar: Grammar | None = None) -> None:
        """`grammar`: of the request's constraint. Without it the request can only be ended."""
        self._scheduler.add(request, arrived_s, grammar)

    def end(self, request_id: str, sequence: int | None, reason: FinishReason) -> None:
        """Ends a request, or one of its sequences, early. Once ended, it stays so."""
        group = self._scheduler.find(request_id)
        if group is None or not group.is_open(sequence):
            return
        if group.first_token_s is not None:
            now_s = self._clock()
            gone = [each for each in group.sequences if sequence in (None, each.index)]
            self._scheduler.remove(group, FINISHED[reason], sequence)
            self._events += [group.finish_event(each, reason, now_s) for each in gone]
        elif reason == "deadline":
            error = DeadlineError(f"the deadline passed before {group.first_output}")
            self._fail([request_id], error, SequenceStatus.FINISHED_DEADLINE)
        else:
            cancelled = CancelledError(f"cancelled before {group.first_output}")
            self._fail([request_id], cancelled, SequenceStatus.FINISHED_CANCELLED)

    def abandon(self, error: RequestError) -> EngineOutputs:
        """Ends everything. There are no steps afterwards."""
        self._fail([group.request_id for group in self._scheduler.groups()], error)
        return self._publish(None)

    def close(self) -> None:
        """After the last step."""
        self._scheduler.close()

    def step(self) -> EngineOutputs:
        """Runs a step for whoever is next; returns all events since the step before."""
        self._end_expired()
        scheduled = self._scheduler.schedule()
        if scheduled is None:
            return self._publish(None)
        started_s = self._clock()
        self._events += [group.start_event(started_s) for group in scheduled.started]
        self._scheduled = scheduled
        try:
            computed, masks = self._run(scheduled)
            output = sample_step(scheduled.chunks, computed, masks)
        except Exception:
            self._fail_step(scheduled)
            output = StepOutput([], [], {}, {})
        else:
            self._num_failures = 0
            output.now_s = self._clock()
            self._scheduler.update(scheduled, output)
            self._collect(output)
        self._scheduled = None
        duration_s = self._clock() - started_s
        self._scheduler.observe(scheduled, duration_s)
        return self._publish(_stats(scheduled, output, duration_s))

    def _run(self, scheduled: SchedulerOutput) -> tuple[ModelOutput, StepMasks]:
        """Copies blocks, encodes sources, runs the model; grammars' masks come meanwhile."""
        chunks = scheduled.chunks
        if scheduled.copies:
            scheduled.at_risk = scheduled.copying
            self._session.copy(scheduled.copies)
        if scheduled.encoding:
            scheduled.at_risk = scheduled.encoding
            self._session.encode(scheduled.sources)
        scheduled.at_risk = [each.group for each in scheduled.prefill or scheduled.decode]
        if not chunks:
            return NOTHING_COMPUTED, StepMasks()
        with self._masks.computing(chunks) as masks:
            computed = self._session.step([each.chunk for each in chunks])
        return computed, masks

    def _end_expired(self) -> None:
        now_s = self._clock()
        for group in self._scheduler.groups():
            deadline_s = group.request.deadline_s
            if deadline_s is not None and deadline_s <= now_s:
                self.end(group.request_id, None, "deadline")

    def _fail_step(self, scheduled: SchedulerOutput) -> None:
        """The requests in prefill failed it, if there were any; running sequences try again."""
        failed = sorted({group.request_id for group in scheduled.at_risk})
        logger.exception("a step failed; its requests: %s", failed)
        self._num_failures += 1
        self._fail_each(failed)

    def _collect(self, output: StepOutput) -> None:
        """A step's events, except of requests that it made fail."""
        failed = output.not_finite | output.lost
        for request_id, logprobs in output.prompt_logprobs.items():
            if request_id not in failed:
                self._events.append(PromptEvent(request_id, tuple(logprobs)))
        if not failed:
            self._events += output.events
            return
        self._events += [each for each in output.events if each.request_id not in failed]
        if output.not_finite:
            names = sorted(output.not_finite)
            logger.error("logits that aren't finite; requests: %s", names)
            self._fail_each(names)
        reason = "has become too complex to follow. Ask for something simpler"
        lost = sorted(output.lost - output.not_finite)
        self._fail(lost, InvalidFieldError("constraint", reason))

    def _fail_each(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            reason = f"a step failed on the server; its log has more under request {request_id}"
            self._fail([request_id], StepError(reason))

    def _fail(
        self,
        request_ids: Iterable[str],
        error: RequestError,
        status: SequenceStatus = SequenceStatus.FAILED,
    ) -> None:
        """Ends requests and all their sequences."""
        for request_id in request_ids:
            group = self._scheduler.find(request_id)
            if group is not None:  # else its last sequence has just finished
                self._scheduler.remove(group, status)
            self._events.append(FailEvent(request_id, error))

    def _publish(self, stats: StepStats | None) -> EngineOutputs:
        events, self._events = tuple(self._events), []
        scheduler = self._scheduler
        queue = QueueStats(
            scheduler.num_seqs,
            scheduler.num_waiting,
            scheduler.num_blocks_used,
            scheduler.num_running,
        )
        # A round without a step may be thrown away.
        disk = None if stats is None else scheduler.take_disk_stats()
        return EngineOutputs(events, stats, queue, disk)


def _stats(scheduled: SchedulerOutput, output: StepOutput, duration_s: float) -> StepStats:
    return StepStats(
        scheduled.kind,
        duration_s,
        scheduled.num_tokens,
        num_prompt_tokens=scheduled.num_prefill_tokens,
        num_draft_tokens=scheduled.num_draft_tokens,
        num_accepted=output.num_accepted,
        num_preempted=scheduled.num_preempted,
        num_jump_forward=output.num_jump_forward,
        masks_s=output.masks_s,
    )
