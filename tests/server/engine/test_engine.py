"""What requests are answered, step by step, without a model or a thread."""

from collections.abc import Sequence

import numpy as np
import pytest

from quill.model.reference.sampling import log_probabilities
from quill.server.engine.model_runner import Chunk, ModelOutput
from quill.server.request import Request, SamplingParams
from tests.server.engine_harness import CONTEXT, Harness, as_translation, make_request
from tests.server.fake_session import logits_after, oracle


def test_answer_is_the_oracles_and_its_account_is_right() -> None:
    harness = Harness()
    request = make_request(seed=5)
    harness.submit(request)
    for _ in range(6):
        harness.now_s += 1.0
        harness.step()
    assert harness.answer(request) == oracle(request, CONTEXT)
    finish = harness.finished["r", 0]
    assert (finish.reason, finish.seed) == ("length", 5)
    assert (finish.usage.prompt, finish.usage.cached, finish.usage.generated) == (7, 0, 6)
    timings = finish.timings
    assert (timings.queue_ms, timings.first_token_ms, timings.total_ms) == (1000, 1000, 6000)
    assert harness.engine.is_idle


def test_each_of_several_answers_is_the_one_its_own_seed_gives_alone() -> None:
    harness = Harness()
    request = make_request(num_sequences=3, seed=11, sampling=SamplingParams(temperature=2.0))
    harness.submit(request)
    harness.run()
    assert harness.answer(request) == oracle(request, CONTEXT)
    for sequence in range(3):
        seed = harness.finished["r", sequence].seed
        alone = make_request(seed=seed, sampling=SamplingParams(temperature=2.0))
        assert oracle(alone, CONTEXT) == [harness.tokens["r", sequence]]


def test_prefix_is_taken_from_the_cache_and_changes_nothing() -> None:
    harness = Harness()
    first, again = make_request("a", num_prompt=40), make_request("a" * 51, num_prompt=40)
    longer = make_request("a", num_prompt=60).prompt_ids
    other = Request(request_id="other", prompt_ids=longer, max_new_tokens=6)
    assert first.prompt_ids == again.prompt_ids == other.prompt_ids[:40]
    for request in (first, again, other):
        harness.submit(request)
        harness.run()
        assert harness.answer(request) == oracle(request, CONTEXT)
    assert harness.started == {"a": 0, "a" * 51: 32, "other": 32}
    assert harness.finished["other", 0].usage.cached == 32


def test_whole_prompt_in_the_cache_still_leaves_its_last_block_to_read() -> None:
    harness = Harness()
    for name in ("a", "a" * 51):
        harness.submit(make_request(name, num_prompt=32, max_new_tokens=1))
        harness.run()
    assert harness.started["a" * 51] == 16
    assert harness.session.steps[-1] == [(16, 32)]
    assert harness.tokens["a", 0] == harness.tokens["a" * 51, 0]


def test_second_turn_of_a_conversation_finds_the_answer_too() -> None:
    harness = Harness()
    first = make_request("a", num_prompt=20, max_new_tokens=30)
    harness.submit(first)
    harness.run()
    history = (*first.prompt_ids, *harness.tokens["a", 0])
    second = Request(request_id="b", prompt_ids=(*history, 7, 7, 7), max_new_tokens=3)
    harness.submit(second)
    harness.run()
    assert harness.started["b"] == 48, "all but the last block of 50 tokens"
    assert harness.answer(second) == oracle(second, CONTEXT)


def test_nothing_is_shared_across_scopes() -> None:
    harness = Harness()
    for name, scope in (("a", "one"), ("a" * 51, "two"), ("a" * 101, "one")):
        harness.submit(make_request(name, num_prompt=40, cache_scope=scope))
        harness.run()
    assert list(harness.started.values()) == [0, 0, 32]


def test_requests_that_come_together_read_their_common_prefix_once() -> None:
    harness = Harness(max_num_seqs=6)
    requests = [make_request("a" * (1 + 50 * i), num_prompt=70) for i in range(6)]
    for request in requests:
        harness.submit(request)
    harness.run()
    num_read = sum(stop - start for step in harness.session.steps for start, stop in step)
    assert num_read < 64 + 6 * (6 + 8 + 8), "and guesses"
    for request in requests:
        assert harness.answer(request) == oracle(request, CONTEXT)
    assert sorted(harness.started.values()) == [0, *[64] * 5]


def test_logprobs_are_of_the_models_distribution_before_penalties() -> None:
    harness = Harness()
    sampling = SamplingParams(temperature=0.0, logit_bias={3: 100.0}, repetition_penalty=1.5)
    harness.submit(make_request(logprobs=2, max_new_tokens=1, sampling=sampling))
    harness.run()
    expected_V = log_probabilities(logits_after(make_request().prompt_ids))
    (report,) = harness.logprobs["r", 0]
    assert report is not None
    assert report.token_id == 3
    assert report.logprob == pytest.approx(expected_V[3], abs=1e-5)
    assert [each.token_id for each in report.top] == np.argsort(-expected_V)[:2].tolist()


def test_prompt_is_scored_without_generating() -> None:
    harness = Harness()
    request = make_request(num_prompt=90, prompt_logprobs=1, max_new_tokens=0)
    harness.submit(request)
    harness.run()
    reports = harness.prompts["r"]
    assert [report.token_id for report in reports] == list(request.prompt_ids)
    assert reports[0].logprob is None
    for i in range(1, 90):
        expected_V = log_probabilities(logits_after(request.prompt_ids[:i]))
        assert reports[i].logprob == pytest.approx(expected_V[request.prompt_ids[i]], abs=1e-5)
        assert reports[i].top[0].token_id == expected_V.argmax()
    assert len(harness.session.steps) > 1
    assert harness.finished["r", 0].usage.generated == 0


def test_scored_prompt_of_one_token_has_nothing_to_report() -> None:
    harness = Harness()
    harness.submit(make_request(num_prompt=1, prompt_logprobs=1, max_new_tokens=2))
    harness.run()
    (report,) = harness.prompts["r"]
    assert report.logprob is None
    assert len(harness.tokens["r", 0]) == 2


def test_sources_that_fit_are_encoded_at_once_and_answered_in_the_same_step() -> None:
    harness = Harness(max_num_seqs=4)
    requests = [
        as_translation(make_request(name, num_prompt=num_prompt, num_sequences=num_sequences))
        for name, num_prompt, num_sequences in (("a", 5, 2), ("bb", 9, 1), ("ccc", 3, 2))
    ]
    for request in requests:
        harness.submit(request)
    harness.step()
    assert harness.started == {"a": 0, "bb": 0}, "the third needs two rows, and one is free"
    assert harness.session.num_encoded == [2]
    assert {len(tokens) for tokens in harness.tokens.values()} == {1}
    harness.run()
    for request in requests:
        assert harness.answer(request) == oracle(request, CONTEXT)
    assert harness.finished["bb", 0].usage.prompt == 9


def test_steps_report_what_they_read_and_who_was_preempted() -> None:
    harness = Harness(max_num_seqs=8, num_blocks=10, step_s=0.001)
    requests = [make_request("x" * (n + 1), num_prompt=20, max_new_tokens=70) for n in range(5)]
    for request in requests:
        harness.submit(request)
    reports = []
    while not harness.engine.is_idle:
        batch = harness.step()
        assert batch.queue is not None
        assert batch.queue.num_blocks <= 10
        reports += [batch.step] if batch.step is not None else []
    assert {report.kind for report in reports} == {"prefill", "decode", "mixed"}
    assert sum(report.num_preempted for report in reports) > 0
    usages = [finish.usage for finish in harness.finished.values()]
    assert sum(report.num_draft_tokens for report in reports) == sum(each.draft for each in usages)
    assert sum(report.num_accepted for report in reports) == sum(each.accepted for each in usages)
    assert sum(report.num_prompt_tokens for report in reports) > 5 * 20, "some were read again"
    assert sum(each.accepted for each in usages) > 0
    for request in requests:
        assert harness.answer(request) == oracle(request, CONTEXT)


def test_engine_says_what_it_is_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    told, step = list[str](), harness.session.step

    def listen(chunks: Sequence[Chunk]) -> ModelOutput:
        told.append(harness.engine.describe())
        return step(chunks)

    monkeypatch.setattr(harness.session, "step", listen)
    harness.submit(make_request("r", num_prompt=7, max_new_tokens=1))
    harness.run()
    assert told == ["a prefill step of 7 tokens for the requests r"]
    assert harness.engine.describe() == "between two runs of the model"
