"""What requests are answered, step by step, without a model or a thread."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quill.model.reference.sampling import log_probabilities
from quill.server.request import Request, Sampling
from tests.server.engine_harness import CONTEXT, House, as_translation, make_request
from tests.server.fake_session import logits_after, oracle


def test_answer_is_the_oracles_and_its_account_is_right() -> None:
    house = House()
    request = make_request(seed=5)
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
    request = make_request(num_sequences=3, seed=11, sampling=Sampling(temperature=2.0))
    house.submit(request)
    house.run()
    assert house.answer(request) == oracle(request, CONTEXT)
    for sequence in range(3):
        seed = house.finished["r", sequence].seed
        alone = make_request(seed=seed, sampling=Sampling(temperature=2.0))
        assert oracle(alone, CONTEXT) == [house.tokens["r", sequence]]


def test_prefix_is_taken_from_the_cache_and_changes_nothing() -> None:
    house = House(cache_bytes=10**6)
    first, again = make_request("a", num_prompt=40), make_request("a" * 51, num_prompt=40)
    longer = make_request("a", num_prompt=60).prompt_ids
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
        house.submit(make_request(name, num_prompt=32))
        house.run()
    assert house.started["a" * 51] == 30
    assert house.session.chunks[-1][1:] == (30, 32)
    assert house.tokens["a", 0] == house.tokens["a" * 51, 0]


def test_logprobs_are_of_the_models_distribution_before_penalties() -> None:
    house = House()
    sampling = Sampling(temperature=0.0, logit_bias={3: 100.0}, repetition_penalty=1.5)
    house.submit(make_request(logprobs=2, max_new_tokens=1, sampling=sampling))
    house.run()
    expected_V = log_probabilities(logits_after(make_request().prompt_ids))
    (report,) = house.logprobs["r", 0]
    assert report is not None
    assert report.token_id == 3
    assert report.logprob == pytest.approx(expected_V[3], abs=1e-5)
    assert [each.token_id for each in report.top] == np.argsort(-expected_V)[:2].tolist()


def test_prompt_is_scored_without_generating() -> None:
    house = House()
    request = make_request(num_prompt=90, prompt_logprobs=1, max_new_tokens=0)
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
    house.submit(make_request(num_prompt=1, prompt_logprobs=1, max_new_tokens=2))
    house.run()
    (report,) = house.prompts["r"]
    assert report.logprob is None
    assert len(house.tokens["r", 0]) == 2


def test_sources_that_fit_are_read_in_one_step_and_answered_in_the_next() -> None:
    house = House(max_rows=4)
    requests = [
        as_translation(make_request(name, num_prompt=num_prompt, num_sequences=num_sequences))
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
            request = make_request(name, **value)
            requests.append(as_translation(request) if translates else request)
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
