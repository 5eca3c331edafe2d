"""The thread around the engine: messages in, batches out, and an end to everything."""

import queue
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from quill.server.engine.engine import MAX_FAILURES, Engine
from quill.server.engine.engine_thread import EngineThread
from quill.server.errors import (
    CancelledError,
    InvalidFieldError,
    RequestError,
    StepError,
    UnavailableError,
)
from quill.server.outputs import EngineOutputs, Event, FailEvent, FinishEvent, TokenEvent
from quill.server.request import Constraint, Grammar, Limits, Request
from tests.server.fake_session import FakeSession, oracle
from tests.server.small_grammars import EOS, small_compiler

CONTEXT = 64
TIMEOUT_S = 120


class _Compiler:
    """Compiles when a test lets it."""

    def __init__(self) -> None:
        self.started: queue.Queue[Future[Grammar]] = queue.Queue()

    def start(self, constraint: Constraint, owner: str) -> Future[Grammar]:
        future: Future[Grammar] = Future()
        self.started.put(future)
        return future


class Served:
    """A running engine thread; events and changes of health arrive in queues."""

    def __init__(self) -> None:
        self.session = FakeSession(16)
        limits = Limits(max_num_seqs=2, context=CONTEXT, num_blocks=16)
        self.engine = Engine(self.session, limits)
        self.events: queue.Queue[Event] = queue.Queue()
        self.health: queue.Queue[bool] = queue.Queue()
        self.compiler = _Compiler()
        self.thread = EngineThread(self.engine, self._publish, self.health.put, self.compiler)

    def _publish(self, batch: EngineOutputs) -> None:
        for event in batch.events:
            self.events.put(event)

    def __enter__(self) -> "Served":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.stop()
        assert self.thread.join(TIMEOUT_S)

    def next_of(self, kind: type[Any]) -> Any:
        while not isinstance(event := self.events.get(timeout=TIMEOUT_S), kind):
            pass
        return event


def _request(name: str, **fields: Any) -> Request:
    return Request(request_id=name, prompt_ids=(1, 2, 3), **{"max_new_tokens": 5, **fields})


def test_requests_are_answered_from_another_thread() -> None:
    with Served() as served:
        for name in ("a", "b"):
            served.thread.submit(_request(name))
            tokens = [served.next_of(TokenEvent).token_id for _ in range(5)]
            assert [tokens] == oracle(_request(name), CONTEXT)
            assert served.next_of(FinishEvent).request_id == name


def test_request_ends_when_ended() -> None:
    with Served() as served:
        served.thread.submit(_request("a", max_new_tokens=60))
        served.next_of(TokenEvent)
        served.thread.end("a")
        finish = served.next_of(FinishEvent)
        assert finish.reason in ("cancelled", "length")


def test_stopping_ends_what_is_running_and_refuses_more(monkeypatch: pytest.MonkeyPatch) -> None:
    served, runs, may_end = Served(), threading.Event(), threading.Event()
    step = served.engine.step

    def step_until_stopped() -> EngineOutputs:
        runs.set()
        assert may_end.wait(TIMEOUT_S)
        return step()

    monkeypatch.setattr(served.engine, "step", step_until_stopped)
    with served:
        served.thread.submit(_request("a"))
        assert runs.wait(TIMEOUT_S)
        served.thread.stop()
        may_end.set()
        assert served.thread.join(TIMEOUT_S)
        with pytest.raises(UnavailableError):
            served.thread.submit(_request("b"))
    assert isinstance(served.next_of(FailEvent).error, UnavailableError)


def test_health_follows_repeated_failures() -> None:
    with Served() as served:
        served.session.failures += [RuntimeError("injected")] * MAX_FAILURES
        for number in range(MAX_FAILURES):
            served.thread.submit(_request(str(number)))
            assert isinstance(served.next_of(FailEvent).error, StepError)
        assert served.health.get(timeout=TIMEOUT_S) is False
        served.thread.submit(_request("fine"))
        served.next_of(FinishEvent)
        assert served.health.get(timeout=TIMEOUT_S) is True


def test_engine_that_breaks_down_fails_everybody_and_answers_later_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served()

    def break_down() -> EngineOutputs:
        raise AssertionError("a bug")

    monkeypatch.setattr(served.engine, "step", break_down)
    with served:
        errors: list[RequestError] = []
        for name in ("a", "b"):
            served.thread.submit(_request(name))
            errors.append(served.next_of(FailEvent).error)
        assert served.health.get(timeout=TIMEOUT_S) is False
    assert isinstance(errors[0], StepError)
    assert isinstance(errors[1], UnavailableError)


def _constrained(name: str) -> Request:
    asked = Constraint("regex", "[a-f]{4}")
    return _request(name, constraint=asked, eos_ids=frozenset({EOS}))


def test_request_runs_when_its_grammar_is_compiled_and_others_run_meanwhile() -> None:
    with Served() as served:
        served.thread.submit(_constrained("a"))
        served.thread.submit(_request("b"))
        assert served.next_of(FinishEvent).request_id == "b"
        compiled = small_compiler().compile_now(Constraint("regex", "[a-f]{4}"))
        served.compiler.started.get(timeout=TIMEOUT_S).set_result(compiled)
        tokens = [served.next_of(TokenEvent).token_id for _ in range(5)]
        assert [tokens] == oracle(_constrained("a"), CONTEXT)
        assert tokens[-1] == EOS


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (InvalidFieldError("constraint.regex", "is bad"), InvalidFieldError),
        (RuntimeError("a bug"), StepError),
    ],
)
def test_grammar_that_fails_to_compile_fails_its_request_alone(
    raised: Exception, expected: type[RequestError]
) -> None:
    with Served() as served:
        served.thread.submit(_constrained("a"))
        served.compiler.started.get(timeout=TIMEOUT_S).set_exception(raised)
        failed = served.next_of(FailEvent)
        assert (failed.request_id, type(failed.error)) == ("a", expected)
        served.thread.submit(_request("b"))
        assert served.next_of(FinishEvent).request_id == "b"
    assert served.health.empty()


def test_request_that_is_ended_while_its_grammar_compiles_is_cancelled_at_once() -> None:
    with Served() as served:
        served.thread.submit(_constrained("a"))
        served.thread.end("a")
        failed = served.next_of(FailEvent)
        assert (failed.request_id, type(failed.error)) == ("a", CancelledError)
        assert served.compiler.started.get(timeout=TIMEOUT_S).cancelled(), "nobody needs it"
        served.thread.submit(_request("b"))
        assert served.next_of(FinishEvent).request_id == "b"
    assert served.events.empty(), "it is answered once"


def test_stopping_ends_requests_whose_grammar_compiles() -> None:
    with Served() as served:
        served.thread.submit(_constrained("a"))
    failed = served.next_of(FailEvent)
    assert (failed.request_id, type(failed.error)) == ("a", UnavailableError)
