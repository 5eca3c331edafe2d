"""Serves requests, one step at a time.

Knows: the scheduler, the executor, the requests' states, and the order in which they are asked.
Does not know: threads, gRPC, text, the model. All of it runs in one thread, see
server/engine/engine_thread.py.
"""

import logging
import time
from collections.abc import Callable, Iterable

from quill.server.engine.executor import Executor, StepResult
from quill.server.engine.request_states import RequestStates
from quill.server.errors import CancelledError, DeadlineError, RequestError, StepError
from quill.server.events import Batch, Crowd, Event, FinishReason, PromptEvent, StepReport
from quill.server.request import Request
from quill.server.runtime.model_runner import Session
from quill.server.runtime.prefix_cache import PrefixCache
from quill.server.sampling.beam_search import Search
from quill.server.scheduler.plan import Plan
from quill.server.scheduler.prefill_budget import PrefillBudget
from quill.server.scheduler.scheduler import Limits, Scheduler

logger = logging.getLogger(__name__)

MAX_FAILURES = 3  # steps that may fail one after another before the engine calls itself broken


class Engine:
    """Requests come by `submit` and go by `end`; each `step` answers what became of them."""

    def __init__(
        self,
        session: Session,
        limits: Limits,
        prefix_cache: PrefixCache,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = Executor(session, prefix_cache)
        self._scheduler = Scheduler(limits, prefix_cache)
        self._states = RequestStates()
        self._prefill_budget = PrefillBudget()
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
        requests = ", ".join(sorted(_request_ids(plan)))
        return f"a {plan.kind} of {plan.num_tokens} tokens for the requests {requests}"

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
        self._executor.copy(self._scheduler.remove(request_id, sequence))
        if self._states.has_token(request_id):
            for each in gone:
                self._finish(request_id, each, reason)
            return
        moment = "the search was over" if self._states.searches(request_id) else "the first token"
        if reason == "deadline":
            self._fail(request_id, DeadlineError(f"the deadline passed before {moment}"))
        else:
            self._fail(request_id, CancelledError(f"cancelled before {moment}"))

    def abandon(self, error: RequestError) -> Batch:
        """Ends everything. There are no steps afterwards."""
        for request_id in self._states.request_ids():
            self._fail(request_id, error)
        return self._batch(None)

    def step(self) -> Batch:
        """A step for whoever is next, and all events since the step before."""
        for request_id in self._states.expired(self._clock()):
            self.end(request_id, None, "deadline")
        max_chunk = self._prefill_budget.max_chunk(self._scheduler.num_rows)
        plan = self._scheduler.plan(max_chunk, self._prefill_budget.may_go_on)
        return self._batch(None if plan is None else self._run(plan))

    def _run(self, plan: Plan) -> StepReport:
        started_s = self._clock()
        for request, cached in plan.starts:
            self._events.append(self._states.start(request, cached, started_s))
        self._under_way = plan
        try:
            result = self._executor.run(plan)
        except Exception:
            logger.exception("a step failed; its requests: %s", _request_ids(plan))
            self._num_failures += 1
            self._fail_all(_request_ids(plan))
        else:
            self._num_failures = 0
            self._commit(plan, result)
        self._under_way = None
        return self._report(plan, self._clock() - started_s)

    def _commit(self, plan: Plan, result: StepResult) -> None:
        outcome = self._scheduler.commit(plan, result.tokens, result.ranked)
        self._executor.copy(outcome.copies)
        if result.broken:
            broken = {plan.rows[i].request.request_id for i in result.broken}
            logger.error("logits that aren't finite; requests: %s", sorted(broken))
            self._fail_all(broken)
        if result.prompt_logprobs:  # all rows are answers to the one prompt
            request_id = plan.rows[0].request.request_id
            self._events.append(PromptEvent(request_id, tuple(result.prompt_logprobs)))
        now_s = self._clock()
        # No tokens if the chunk wasn't its prompt's last.
        for row, token, logprobs in zip(plan.rows, result.tokens, result.logprobs, strict=False):
            if row.search is None and row.request.request_id in self._states:
                self._events.append(self._states.token(row, token, logprobs, now_s))
        for row, reason in outcome.finished:
            if row.request.request_id in self._states:
                self._finish(row.request.request_id, row.sequence, reason)
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
            self._executor.copy(self._scheduler.remove(request_id))
            reason = f"a step failed on the server; its log has more under request {request_id}"
            self._fail(request_id, StepError(reason))

    def _report(self, plan: Plan, duration_s: float) -> StepReport:
        if plan.kind == "decode":
            self._prefill_budget.note_decode(duration_s)
        else:
            self._prefill_budget.note_prefill(
                plan.num_tokens, duration_s, self._scheduler.num_waiting
            )
        return StepReport(plan.kind, duration_s, plan.num_tokens)

    def _batch(self, report: StepReport | None) -> Batch:
        events, self._events = tuple(self._events), []
        return Batch(events, report, Crowd(self._scheduler.num_rows, self._scheduler.num_waiting))


def _request_ids(plan: Plan) -> set[str]:
    return {row.request.request_id for row in plan.rows}
