"""What becomes of requests, step by step, without a model or a thread."""

import dataclasses
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.sampling import log_probabilities
from server.engine import MAX_FAILURES, Engine
from server.errors import CancelledError, DeadlineError, RequestError, StepError, UnavailableError
from server.events import (
    Batch,
    FailEvent,
    FinishEvent,
    HypothesisEvent,
    PositionLogprobs,
    PromptEvent,
    StartEvent,
    TokenEvent,
)
from server.prefix_cache import PrefixCache
from server.request import Request, Sampling
from server.scheduler import Limits
from tests.server.fake_session import VOCAB_SIZE, FakeSession, logits_after, oracle

CONTEXT = 96


class House:
    """An engine on a fake session with a clock that only tests turn, and all that came out."""

    def __init__(self, max_rows: int = 4, cache_bytes: int = 0) -> None:
        self.session = FakeSession(max_rows, CONTEXT)
        self.now_s = 0.0
        limits = Limits(max_rows=max_rows, context=CONTEXT)
        self.cache = PrefixCache(cache_bytes)
        self.engine = Engine(self.session, limits, self.cache, clock=lambda: self.now_s)
        self.started: dict[str, int] = {}
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.logprobs: dict[tuple[str, int], list[PositionLogprobs | None]] = defaultdict(list)
        self.prompts: dict[str, list[PositionLogprobs]] = defaultdict(list)
        self.finished: dict[tuple[str, int], FinishEvent] = {}
        self.failed: dict[str, RequestError] = {}

    def submit(self, request: Request) -> None:
        self.engine.submit(request, self.now_s)

    def step(self) -> Batch:
        batch = self.engine.step()
        self.note(batch)
        return batch

    def run(self) -> None:
        for _ in range(10_000):
            if self.engine.is_idle:
                return
            self.step()
        raise AssertionError("the engine never comes to rest")

    def note(self, batch: Batch) -> None:
        for event in batch.events:
            assert event.request_id not in self.failed, "nothing follows the end"
            if isinstance(event, StartEvent):
                assert event.request_id not in self.started
                self.started[event.request_id] = event.cached
            elif isinstance(event, PromptEvent):
                self.prompts[event.request_id] += event.logprobs
            elif isinstance(event, FailEvent):
                self.failed[event.request_id] = event.error
            elif not isinstance(event, HypothesisEvent):
                self._note_sequence(event)

    def _note_sequence(self, event: TokenEvent | FinishEvent) -> None:
        key = (event.request_id, event.sequence)
        assert key not in self.finished, "nothing follows the end"
        assert event.request_id in self.started
        if isinstance(event, TokenEvent):
            self.tokens[key].append(event.token_id)
            self.logprobs[key].append(event.logprobs)
        else:
            self.finished[key] = event

    def answer(self, request: Request) -> list[list[int]]:
        return [self.tokens[request.request_id, i] for i in range(request.num_sequences)]


def _request(name: str = "r", num_prompt: int = 7, **fields: Any) -> Request:
    prompt = tuple((len(name) * 5 + i * i) % VOCAB_SIZE for i in range(num_prompt))
    fields.setdefault("max_new_tokens", 6)
    return Request(request_id=name, **{"prompt_ids": prompt, **fields})


def test_answer_is_the_oracles_and_its_account_is_right() -> None:
    house = House()
    request = _request(seed=5)
    house.submit(request)
    for _ in range(6):
        house.now_s += 1.0
        house.step()
    assert house.answer(request) == oracle(request, CONTEXT)
    finish = house.finished["r", 0]
    assert (finish.reason, finish.seed) == ("length", 5)
    assert (finish.usage.prompt, finish.usage.cached, finish.usage.generated) == (7, 0, 6)
    timings = finish.timings
    assert (timings.queue_ms, timings.first_token_ms, timings.total_ms) == (1000, 1000, 6000)
    assert house.engine.is_idle


def test_each_of_several_answers_is_the_one_its_own_seed_gives_alone() -> None:
    house = House()
    request = _request(num_sequences=3, seed=11, sampling=Sampling(temperature=2.0))
    house.submit(request)
    house.run()
    assert house.answer(request) == oracle(request, CONTEXT)
    for sequence in range(3):
        seed = house.finished["r", sequence].seed
        alone = _request(seed=seed, sampling=Sampling(temperature=2.0))
        assert oracle(alone, CONTEXT) == [house.tokens["r", sequence]]


def test_prefix_is_taken_from_the_cache_and_changes_nothing() -> None:
    house = House(cache_bytes=10**6)
    first, again = _request("a", num_prompt=40), _request("a" * 51, num_prompt=40)
    longer = _request("a", num_prompt=60).prompt_ids
    other = Request(request_id="other", prompt_ids=longer, max_new_tokens=6)
    assert first.prompt_ids == again.prompt_ids == other.prompt_ids[:40]
    for request in (first, again, other):
        house.submit(request)
        house.run()
        assert house.answer(request) == oracle(request, CONTEXT)
    assert house.started == {"a": 0, "a" * 51: 32, "other": 32}
    assert house.finished["other", 0].usage.cached == 32


def test_whole_prompt_in_the_cache_still_leaves_two_tokens_to_read() -> None:
    house = House(cache_bytes=10**6)
    for name in ("a", "a" * 51):
        house.submit(_request(name, num_prompt=32))
        house.run()
    assert house.started["a" * 51] == 30
    assert house.session.chunks[-1][1:] == (30, 32)
    assert house.tokens["a", 0] == house.tokens["a" * 51, 0]


def test_logprobs_are_of_the_models_distribution_before_penalties() -> None:
    house = House()
    sampling = Sampling(temperature=0.0, logit_bias={3: 100.0}, repetition_penalty=1.5)
    house.submit(_request(logprobs=2, max_new_tokens=1, sampling=sampling))
    house.run()
    expected_V = log_probabilities(logits_after(_request().prompt_ids))
    (report,) = house.logprobs["r", 0]
    assert report is not None
    assert report.token_id == 3
    assert report.logprob == pytest.approx(expected_V[3], abs=1e-5)
    assert [each.token_id for each in report.top] == np.argsort(-expected_V)[:2].tolist()


def test_prompt_is_scored_without_generating() -> None:
    house = House()
    request = _request(num_prompt=90, prompt_logprobs=1, max_new_tokens=0)
    house.submit(request)
    house.run()
    reports = house.prompts["r"]
    assert [report.token_id for report in reports] == list(request.prompt_ids)
    assert reports[0].logprob is None
    for i in range(1, 90):
        expected_V = log_probabilities(logits_after(request.prompt_ids[:i]))
        assert reports[i].logprob == pytest.approx(expected_V[request.prompt_ids[i]], abs=1e-5)
        assert reports[i].top[0].token_id == expected_V.argmax()
    assert len(house.session.chunks) > 1
    assert house.finished["r", 0].usage.generated == 0


def test_scored_prompt_of_one_token_has_nothing_to_report() -> None:
    house = House()
    house.submit(_request(num_prompt=1, prompt_logprobs=1, max_new_tokens=2))
    house.run()
    (report,) = house.prompts["r"]
    assert report.logprob is None
    assert len(house.tokens["r", 0]) == 2


def test_deadline_in_the_queue_is_an_error() -> None:
    house = House(max_rows=1)
    house.submit(_request("running", max_new_tokens=50))
    house.submit(_request("late", deadline_s=3.0))
    house.step()
    house.now_s = 3.0
    house.step()
    assert isinstance(house.failed["late"], DeadlineError)
    assert "late" not in house.started


def test_deadline_of_a_running_request_keeps_what_was_made() -> None:
    house = House()
    house.submit(_request(max_new_tokens=50, deadline_s=3.0, num_sequences=2))
    house.step()
    house.step()
    house.now_s = 3.5
    house.step()
    for sequence in range(2):
        assert house.finished["r", sequence].reason == "deadline"
        assert house.finished["r", sequence].usage.generated == 2
    assert house.engine.is_idle


def test_cancelled_request_frees_its_slot_before_the_next_step() -> None:
    house = House(max_rows=1)
    house.submit(_request("gone", max_new_tokens=50))
    house.step()
    house.submit(_request("next"))
    house.engine.end("gone", None, "cancelled")
    house.step()
    assert house.finished["gone", 0].reason == "cancelled"
    assert "next" in house.started


def test_request_cancelled_while_its_prompt_is_read_fails() -> None:
    house = House()
    house.submit(_request("running", max_new_tokens=50))
    house.step()
    house.submit(_request("gone", num_prompt=80))
    house.step()
    house.step()
    assert "gone" in house.started
    house.engine.end("gone", None, "cancelled")
    house.step()
    assert isinstance(house.failed["gone"], CancelledError)


def test_ending_what_has_ended_or_never_was_does_nothing() -> None:
    house = House()
    house.submit(_request())
    house.run()
    house.engine.end("r", None, "cancelled")
    house.engine.end("r", 0, "stop")
    house.engine.end("never was", None, "cancelled")
    assert house.engine.is_idle


def test_one_sequence_stopped_leaves_the_others() -> None:
    house = House()
    request = _request(num_sequences=3, max_new_tokens=9, sampling=Sampling(temperature=3.0))
    house.submit(request)
    house.step()
    house.engine.end("r", 0, "stop")
    house.run()
    assert house.finished["r", 0].reason == "stop"
    assert house.answer(request)[1:] == oracle(request, CONTEXT)[1:]


def test_failing_decode_step_fails_its_rows_and_nobody_else() -> None:
    house = House()
    for name in ("a", "bb"):
        house.submit(_request(name, max_new_tokens=20))
    for _ in range(4):
        house.step()
    house.session.failures.append(RuntimeError("injected"))
    house.step()
    waiting = _request("ccc")
    house.submit(waiting)
    house.run()
    assert set(house.failed) == {"a", "bb"}
    assert all(isinstance(error, StepError) for error in house.failed.values())
    assert "request a" in str(house.failed["a"])
    assert house.answer(waiting) == oracle(waiting, CONTEXT)


def test_failing_prefill_fails_its_request_only() -> None:
    house = House()
    running = _request("a", max_new_tokens=20)
    house.submit(running)
    house.step()
    house.step()
    house.submit(_request("bb"))
    house.session.failures.append(RuntimeError("injected"))
    house.run()
    assert set(house.failed) == {"bb"}
    assert house.answer(running) == oracle(running, CONTEXT)


def test_repeated_failures_break_the_engine_and_a_success_mends_it() -> None:
    house = House()
    for number in range(MAX_FAILURES):
        assert not house.engine.is_broken
        house.session.failures.append(RuntimeError("injected"))
        house.submit(_request("x" * (number + 1)))
        house.run()
    assert house.engine.is_broken
    house.submit(_request("fine" * 5))
    house.run()
    assert not house.engine.is_broken


def test_row_whose_logits_are_not_finite_fails_alone() -> None:
    house = House()
    requests = [_request(name, max_new_tokens=10) for name in ("a", "bb", "ccc")]
    for request in requests:
        house.submit(request)
    while len(house.started) < 3:
        house.step()
    house.session.poisoned = {1}
    house.step()
    house.session.poisoned = set()
    house.run()
    assert set(house.failed) == {"bb"}
    assert isinstance(house.failed["bb"], StepError)
    for request in (requests[0], requests[2]):
        assert house.answer(request) == oracle(request, CONTEXT)


def test_abandoning_ends_everybody() -> None:
    house = House(max_rows=1)
    for name in ("a", "bb"):
        house.submit(_request(name, max_new_tokens=50))
    house.step()
    house.note(house.engine.abandon(UnavailableError("stopping")))
    assert set(house.failed) == {"a", "bb"}
    assert house.engine.is_idle


def _translation(request: Request) -> Request:
    return dataclasses.replace(request, prompt_ids=(0,), source_ids=request.prompt_ids)


def test_sources_that_fit_are_read_in_one_step_and_answered_in_the_next() -> None:
    house = House(max_rows=4)
    requests = [
        _translation(_request(name, num_prompt=num_prompt, num_sequences=num_sequences))
        for name, num_prompt, num_sequences in (("a", 5, 2), ("bb", 9, 1), ("ccc", 3, 2))
    ]
    for request in requests:
        house.submit(request)
    house.step()
    assert house.started == {"a": 0, "bb": 0}, "the third needs two slots, and one is free"
    assert not house.tokens
    house.step()
    assert house.session.num_decoded == [3]
    house.run()
    for request in requests:
        assert house.answer(request) == oracle(request, CONTEXT)
    assert house.finished["bb", 0].usage.prompt == 9


def test_encoder_that_fails_fails_its_requests_and_no_others() -> None:
    house = House()
    first, second = (_translation(_request(name)) for name in ("a", "bb"))
    house.submit(first)
    house.step()
    house.submit(second)
    house.session.failures.append(RuntimeError("broken"))
    house.run()
    assert isinstance(house.failed["bb"], StepError)
    assert house.answer(first) == oracle(first, CONTEXT)


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
)
REQUESTS = st.fixed_dictionaries(
    {
        "num_prompt": st.integers(1, 70),
        "max_new_tokens": st.integers(1, 12),
        "num_sequences": st.integers(1, 3),
        "priority": st.integers(-1, 1),
        "seed": st.integers(0, 2**64 - 1),
        "eos_ids": st.sampled_from([frozenset[int](), frozenset({1, 2, 3, 4})]),
        "sampling": SAMPLINGS,
    }
)
ACTIONS = st.one_of(
    st.tuples(st.just("submit"), REQUESTS),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("end"), st.integers(0, 12)),
)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(3, 6),
    st.sampled_from([0, 4_000, 10**6]),
    st.booleans(),
    st.lists(ACTIONS, max_size=40),
)
def test_any_crowd_gets_the_oracles_answers(
    max_rows: int, cache_bytes: int, translates: bool, actions: list[tuple[str, Any]]
) -> None:
    house = House(max_rows, cache_bytes)
    requests: list[Request] = []
    ended: set[str] = set()
    for kind, value in actions:
        if kind == "submit":
            # Names of 10 lengths, so that prompts begin alike and the cache has something to do.
            name = f"{len(requests):03}" + "x" * (len(requests) % 10)
            request = _request(name, **value)
            requests.append(_translation(request) if translates else request)
            house.submit(requests[-1])
        elif kind == "step":
            for _ in range(value):
                house.now_s += 0.01
                house.step()
        elif value < len(requests):
            ended.add(requests[value].request_id)
            house.engine.end(requests[value].request_id, None, "cancelled")
    house.run()
    for request in requests:
        ends = [
            request.request_id in house.failed or (request.request_id, i) in house.finished
            for i in range(request.num_sequences)
        ]
        assert all(ends), "every request ends"
        if request.request_id not in ended:
            assert house.answer(request) == oracle(request, CONTEXT)
