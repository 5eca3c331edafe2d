"""Serves requests, one step at a time.

Knows: the scheduler, the executor, the requests' states, and the order in which they are asked.
Does not know: threads, gRPC, text, the model. All of it runs in one thread, see
server/engine/engine_thread.py.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from quill.server.engine.executor import Executor
from quill.server.engine.model_runner import Session
from quill.server.engine.scheduler import Scheduler
from quill.server.engine.sequence import Group, Row
from quill.server.engine.step import Outcome, Plan, StepResult
from quill.server.errors import (
    CancelledError,
    DeadlineError,
    InvalidFieldError,
    RequestError,
    StepError,
)
from quill.server.limits import Limits
from quill.server.outputs import (
    EmbeddingEvent,
    EngineOutputs,
    Event,
    FailEvent,
    FinishEvent,
    FinishReason,
    HypothesisEvent,
    PositionLogprobs,
    PromptEvent,
    QueueStats,
    StartEvent,
    StepStats,
    Timings,
    TokenEvent,
    Usage,
)
from quill.server.request import Request
from quill.server.sampling.beam_search import Beam, Search
from quill.server.sampling.sampler import sequence_seed

logger = logging.getLogger(__name__)

MAX_FAILURES = 3  # steps that may fail one after another before the engine calls itself broken


class Engine:
    """Requests come by `submit` and go by `end`; each `step` answers what became of them."""

    def __init__(
        self,
        session: Session,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._executor = Executor(session)
        self._scheduler = Scheduler(limits)
        self._states = RequestStates()
        self._clock = clock
        self._events: list[Event] = []
        self._num_failures = 0
        self._under_way: Plan | None = None  # what is being run; read from other threads, too

    @property
    def is_idle(self) -> bool:
        """Nobody is served, and nobody has still to be told something."""
        return not len(self._states) and not self._events

    @property
    def is_broken(self) -> bool:
        """Step after step fails. It goes on trying; one success makes it whole again."""
        return self._num_failures >= MAX_FAILURES

    def describe(self) -> str:
        """What it is doing, for people. From any thread."""
        plan = self._under_way
        if plan is None:
            return "between two runs of the model"
        requests = ", ".join(sorted({part.row.request.request_id for part in plan.parts}))
        return f"a {plan.kind} step of {plan.num_tokens} tokens for the requests {requests}"

    def fits(self, request: Request) -> bool:
        """Whether it can ever be served; others mustn't be submitted. From any thread."""
        return self._limits.fits(request)

    def submit(self, request: Request, arrived_s: float) -> None:
        self._states.arrive(request, arrived_s)
        self._scheduler.add(request)

    def end(self, request_id: str, sequence: int | None, reason: FinishReason) -> None:
        """Ends a request, or one of its sequences, before its time. Once ended, it stays so."""
        gone = self._states.open_sequences(request_id)
        if sequence is not None:
            gone = [each for each in gone if each == sequence]
        if not gone:
            return
        if self._states.has_token(request_id):
            self._scheduler.remove(request_id, sequence)
            for each in gone:
                self._finish(request_id, each, reason)
            return
        self._scheduler.remove(request_id)
        moment = self._states.first_moment(request_id)
        if reason == "deadline":
            self._fail(request_id, DeadlineError(f"the deadline passed before {moment}"))
        else:
            self._fail(request_id, CancelledError(f"cancelled before {moment}"))

    def abandon(self, error: RequestError) -> EngineOutputs:
        """Ends everything. There are no steps afterwards."""
        for request_id in self._states.request_ids():
            self._fail(request_id, error)
        return self._batch(None)

    def step(self) -> EngineOutputs:
        """A step for whoever is next, and all events since the step before."""
        for request_id in self._states.expired(self._clock()):
            self.end(request_id, None, "deadline")
        num_preempted = self._scheduler.num_preempted
        plan = self._scheduler.plan()
        num_preempted = self._scheduler.num_preempted - num_preempted
        return self._batch(None if plan is None else self._run(plan, num_preempted))

    def _run(self, plan: Plan, num_preempted: int) -> StepStats:
        started_s = self._clock()
        for request, cached in plan.starts:
            self._events.append(self._states.start(request, cached, started_s))
        self._under_way = plan
        ran = self._execute(plan)
        self._under_way = None
        duration_s = self._clock() - started_s
        self._scheduler.note(plan, duration_s)
        result, outcome = ran or (None, Outcome())
        return StepStats(
            plan.kind,
            duration_s,
            plan.num_tokens,
            num_prompt_tokens=plan.num_read,
            num_draft_tokens=plan.num_draft_tokens,
            num_accepted=outcome.num_accepted,
            num_preempted=num_preempted,
            num_jump_forward=outcome.num_jump_forward,
            masks_s=None if result is None else result.masks_s,
        )

    def _execute(self, plan: Plan) -> tuple[StepResult, Outcome] | None:
        """If it fails, those whose prompts are read are to blame; the running rows try again."""
        to_blame: Sequence[Row | Group] = plan.copying
        try:
            self._executor.copy(plan)
            to_blame = plan.encoding
            self._executor.encode(plan)
            to_blame = [part.row for part in plan.reading or plan.running]
            result = self._executor.run(plan)
        except Exception:
            failed = {each.request.request_id for each in to_blame}
            logger.exception("a step failed; its requests: %s", sorted(failed))
            self._num_failures += 1
            self._fail_all(failed)
            return None
        self._num_failures = 0
        outcome = self._scheduler.commit(plan, result)
        self._tell(result, outcome)
        return result, outcome

    def _tell(self, result: StepResult, outcome: Outcome) -> None:
        if outcome.broken:
            logger.error("logits that aren't finite; requests: %s", sorted(outcome.broken))
            self._fail_all(outcome.broken)
        for request_id in sorted(outcome.lost):
            self._scheduler.remove(request_id)
            reason = "has become too complex to follow. Ask for something simpler"
            self._fail(request_id, InvalidFieldError("constraint", reason))
        self._events += [
            PromptEvent(request_id, tuple(logprobs))
            for request_id, logprobs in result.prompt_logprobs.items()
            if request_id in self._states
        ]
        now_s = self._clock()
        for row, token, report in outcome.said:
            if row.request.request_id in self._states:
                self._events.append(self._states.token(row, token, report, now_s))
        self._events += [
            EmbeddingEvent(row.request.request_id, row.sequence, vector_D)
            for row, vector_D in outcome.vectors
            if row.request.request_id in self._states
        ]
        for row, reason in outcome.finished:
            if row.request.request_id in self._states:
                sequence = row.sequence if row.request.pooling is None else 0
                self._finish(row.request.request_id, sequence, reason)
        for search in outcome.found:
            if search.request.request_id in self._states:
                self._answer(search, now_s)

    def _answer(self, search: Search, now_s: float) -> None:
        """A beam search is over: all that its client is told comes now."""
        request = search.request
        for sequence, (beam, score, reason) in enumerate(search.answers[: request.num_sequences]):
            told = self._states.hypothesis(request.request_id, sequence, beam, now_s)
            ended = self._states.finish(request.request_id, sequence, reason, now_s, score)
            self._events += (told, ended)

    def _finish(self, request_id: str, sequence: int, reason: FinishReason) -> None:
        self._events.append(self._states.finish(request_id, sequence, reason, self._clock()))

    def _fail(self, request_id: str, error: RequestError) -> None:
        self._events.append(self._states.fail(request_id, error))

    def _fail_all(self, request_ids: Iterable[str]) -> None:
        for request_id in sorted(request_ids):
            self._scheduler.remove(request_id)
            reason = f"a step failed on the server; its log has more under request {request_id}"
            self._fail(request_id, StepError(reason))

    def _batch(self, report: StepStats | None) -> EngineOutputs:
        events, self._events = tuple(self._events), []
        scheduler = self._scheduler
        queue = QueueStats(
            scheduler.num_rows,
            scheduler.num_waiting,
            scheduler.num_blocks_held,
            scheduler.num_groups,
        )
        return EngineOutputs(events, report, queue)


@dataclass
class _State:
    request: Request
    arrived_s: float
    generated: dict[int, int]  # tokens of each sequence that hasn't ended
    started_s: float | None = None
    first_token_s: float | None = None
    cached: int = 0
    guesses: dict[int, tuple[int, int]] = field(default_factory=dict)  # and how many were right


class RequestStates:
    """One state for each request, from its arrival to its end."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def __len__(self) -> int:
        return len(self._states)

    def request_ids(self) -> list[str]:
        return list(self._states)

    def expired(self, now_s: float) -> list[str]:
        """Those whose deadline has passed."""
        return [
            request_id
            for request_id, state in self._states.items()
            if state.request.deadline_s is not None and state.request.deadline_s <= now_s
        ]

    def has_token(self, request_id: str) -> bool:
        return self._states[request_id].first_token_s is not None

    def first_moment(self, request_id: str) -> str:
        """When it has something to send, in words: of some requests all comes in the end."""
        request = self._states[request_id].request
        if request.pooling is not None:
            return "all texts were read"
        return "the first token" if request.beams is None else "the search was over"

    def open_sequences(self, request_id: str) -> list[int]:
        state = self._states.get(request_id)
        return [] if state is None else list(state.generated)

    def arrive(self, request: Request, now_s: float) -> None:
        assert request.request_id not in self._states, "request ids are unique"
        generated = dict.fromkeys(range(request.num_sequences), 0)
        self._states[request.request_id] = _State(request, now_s, generated)

    def start(self, request: Request, cached: int, now_s: float) -> StartEvent:
        state = self._states[request.request_id]
        state.started_s, state.cached = now_s, cached
        is_looked_up = request.source_ids is None and request.pooling is None
        return StartEvent(request.request_id, cached, is_looked_up)

    def token(
        self, row: Row, token: int, logprobs: PositionLogprobs | None, now_s: float
    ) -> TokenEvent:
        state = self._states[row.request.request_id]
        state.generated[row.sequence] += 1
        state.guesses[row.sequence] = row.num_draft_tokens, row.num_accepted
        if state.first_token_s is None:
            state.first_token_s = now_s
        return TokenEvent(row.request.request_id, row.sequence, token, logprobs)

    def hypothesis(
        self, request_id: str, sequence: int, beam: Beam, now_s: float
    ) -> HypothesisEvent:
        state = self._states[request_id]
        state.generated[sequence] = len(beam.token_ids)
        state.first_token_s = now_s
        return HypothesisEvent(request_id, sequence, beam.token_ids, beam.reports)

    def finish(
        self,
        request_id: str,
        sequence: int,
        reason: FinishReason,
        now_s: float,
        score: float | None = None,
    ) -> FinishEvent:
        """Ends a sequence, and with the last one the request."""
        state = self._states[request_id]
        generated = state.generated.pop(sequence)
        if not state.generated:
            del self._states[request_id]
        return FinishEvent(
            request_id,
            sequence,
            reason,
            seed=sequence_seed(state.request.seed, sequence),
            usage=Usage(
                state.request.num_prompt, state.cached, generated, *state.guesses.get(sequence, ())
            ),
            timings=_timings(state, now_s),
            score=score,
        )

    def fail(self, request_id: str, error: RequestError) -> FailEvent:
        """Ends the request and all its sequences."""
        del self._states[request_id]
        return FailEvent(request_id, error)


def _timings(state: _State, now_s: float) -> Timings:
    def since_arrival_ms(moment_s: float | None) -> float:
        return 0.0 if moment_s is None else 1000 * (moment_s - state.arrived_s)

    return Timings(
        queue_ms=since_arrival_ms(state.started_s),
        first_token_ms=since_arrival_ms(state.first_token_s),
        total_ms=since_arrival_ms(now_s),
    )
