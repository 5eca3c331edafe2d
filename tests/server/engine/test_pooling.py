"""Texts that are read for their vectors, by encoders and beside generations, without a model."""

import math
import random
from typing import Any

import numpy as np
import pytest

from quill.model.reference.sampling import log_probabilities
from quill.server.errors import CancelledError, DeadlineError, StepError
from quill.server.request import Pooling, PoolingParams, Request
from tests.server.engine_harness import CONTEXT, Harness, make_reading, make_request
from tests.server.fake_session import hidden_after, logits_after, oracle

# How engines for encoders are limited: a place for each text of a step.
ENCODER: dict[str, Any] = {"whole_prompts": True, "block_size": CONTEXT, "prefix_caching": False}


def expected(request: Request, is_whole: bool) -> dict[int, list[float]]:
    """Token by token, in plain Python: float64, in order."""
    assert request.pooling is not None
    vectors = {}
    for number, text in enumerate(request.pooling.texts):
        rows = [
            hidden_after([*text, i] if is_whole else text[: i + 1]).tolist()
            for i in range(len(text))
        ]
        chosen = {"mean": rows, "first": rows[:1], "last": rows[-1:]}[request.pooling.method]
        total = chosen[0]
        for row in chosen[1:]:
            total = [a + b for a, b in zip(total, row, strict=True)]
        vectors[number] = [float(np.float32(each / len(chosen))) for each in total]
    return vectors


def harnesses(**fields: Any) -> list[Harness]:
    return [Harness(**fields), Harness(**{"num_blocks": 64, **fields, **ENCODER})]


@pytest.mark.parametrize("is_whole", [False, True], ids=["causal", "encoder"])
@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_each_text_has_its_vector_whatever_its_company(pooling: Pooling, is_whole: bool) -> None:
    harness = harnesses(step_s=0.001)[is_whole]
    lengths = (1, 40, 3, CONTEXT, 16, 17, 2, 60)
    request = make_reading("r", lengths, pooling)
    harness.submit(request)
    harness.run()
    assert harness.vectors["r"] == expected(request, is_whole)
    finish = harness.finished["r", 0]
    assert (finish.usage.prompt, finish.usage.cached, finish.usage.generated) == (
        *(sum(lengths), 0, 0),
    )


@pytest.mark.parametrize("is_whole", [False, True], ids=["causal", "encoder"])
def test_batch_gives_the_same_embeddings_as_each_alone(is_whole: bool) -> None:
    rng = random.Random(1)
    harness = harnesses(num_blocks=24, max_prefill_tokens=128, step_s=0.003)[is_whole]
    requests = [
        make_reading(
            "x" * (n + 1), [rng.randint(1, CONTEXT) for _ in range(rng.randint(1, 12))], owner=owner
        )
        for n, owner in enumerate("aabbbc")
    ]
    others = [] if is_whole else [make_request("y" * n, num_prompt=9 * n) for n in range(1, 5)]
    for request in [*requests, *others]:
        harness.submit(request)
        harness.step()
    harness.run()
    for request in requests:
        alone = harnesses(num_blocks=24)[is_whole]
        alone.submit(request)
        alone.run()
        assert harness.vectors[request.request_id] == alone.vectors[request.request_id]
        assert harness.vectors[request.request_id] == expected(request, is_whole)
    for request in others:
        assert harness.answer(request) == oracle(request, CONTEXT)


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_range_is_the_vector_of_its_tokens_within_the_text(pooling: Pooling) -> None:
    harness = Harness(max_prefill_tokens=10, **{**ENCODER, "whole_prompts": False})
    text = tuple(range(30))
    ranges = (range(3, 25), range(29, 30), range(0, 1))
    reading = PoolingParams(texts=(text,) * 3, method=pooling, ranges=ranges)
    harness.submit(Request(request_id="r", pooling=reading, max_new_tokens=0))
    harness.run()
    for number, of in enumerate(ranges):
        places = {"mean": of, "first": of[:1], "last": of[-1:]}[pooling]
        rows = [hidden_after(text[: place + 1]).astype(np.float64) for place in places]
        expected_D = (np.add.accumulate(rows)[-1] / len(rows)).astype(np.float32)
        assert harness.vectors["r"][number] == expected_D.tolist()


def test_texts_are_packed_up_to_the_steps_limit_and_never_cut_for_an_encoder() -> None:
    harness = Harness(num_blocks=64, max_prefill_tokens=100, **ENCODER)
    request = make_reading("r", [30] * 7 + [96])
    harness.submit(request)
    harness.run()
    assert [len(step) for step in harness.session.steps] == [2, 3, 2, 1], "the first is a try"
    assert harness.session.steps[-1] == [(0, 96)]
    assert harness.vectors["r"] == expected(request, is_whole=True)


def test_running_sequences_go_on_beside_many_texts() -> None:
    harness = Harness(step_s=0.0005)
    talker = make_request("talker", max_new_tokens=40)
    harness.submit(talker)
    harness.step()
    harness.submit(make_reading("texts", [20] * 50))
    num_before = len(harness.tokens["talker", 0])
    for num_steps in range(1, 11):
        harness.step()
        assert len(harness.tokens["talker", 0]) >= num_before + num_steps
    harness.run()
    assert harness.answer(talker) == oracle(talker, CONTEXT)
    assert harness.vectors["texts"] == expected(make_reading("texts", [20] * 50), is_whole=False)


def test_newcomer_with_one_text_doesnt_wait_for_another_owners_thousand() -> None:
    harness = Harness(num_blocks=512, max_prefill_tokens=200, step_s=0.001, **ENCODER)
    harness.submit(make_reading("crowd", [20] * 300, owner="a"))
    harness.step()
    harness.submit(make_reading("one", [20], owner="b"))
    harness.step()
    assert ("one", 0) in harness.finished
    assert ("crowd", 0) not in harness.finished


def test_texts_that_are_preempted_end_with_the_same_embeddings() -> None:
    harness = Harness(num_blocks=9, max_prefill_tokens=10, step_s=0.001)
    old = make_request("old", num_prompt=20, max_new_tokens=76)
    reading = make_reading("young", [70 + n for n in range(20)])
    harness.submit(old)
    harness.submit(reading)
    num_preempted = 0
    while not harness.engine.is_idle:
        batch = harness.step()
        num_preempted += batch.step.num_preempted if batch.step is not None else 0
    assert num_preempted > 0
    assert harness.vectors["young"] == expected(reading, is_whole=False)
    assert harness.answer(old) == oracle(old, CONTEXT)


@pytest.mark.parametrize("is_whole", [False, True], ids=["causal", "encoder"])
@pytest.mark.parametrize("reason", ["cancelled", "deadline"])
def test_request_that_ends_early_ends_once_and_leaves_nothing(reason: Any, is_whole: bool) -> None:
    harness = harnesses(max_prefill_tokens=40)[is_whole]
    harness.submit(make_reading("r", [20] * 9, deadline_s=100.0))
    harness.step()
    harness.step()
    assert harness.vectors["r"]
    if reason == "deadline":
        harness.now_s = 101.0
    else:
        harness.engine.end("r", None, "cancelled")
    harness.run()
    kind = DeadlineError if reason == "deadline" else CancelledError
    assert type(harness.failed["r"]) is kind
    assert "before all texts were read" in str(harness.failed["r"])
    assert harness.step().queue == (0, 0, 0, 0)
    again = make_reading("again", [20] * 9)
    harness.submit(again)
    harness.run()
    assert harness.vectors["again"] == expected(again, is_whole)


def test_hidden_state_that_isnt_finite_fails_its_own_request_only() -> None:
    harness = Harness()
    good, bad = make_reading("g", [7]), make_reading("bb", [9, 9])
    harness.session.poisoned = {1}
    harness.submit(good)
    harness.submit(bad)
    harness.step()
    harness.session.poisoned = set()
    harness.run()
    assert isinstance(harness.failed["bb"], StepError)
    assert harness.vectors["g"] == expected(good, is_whole=False)


def test_step_that_fails_fails_the_texts_in_it() -> None:
    harness = Harness(num_blocks=8, **ENCODER)
    harness.session.failures.append(RuntimeError("no"))
    harness.submit(make_reading("r", [7]))
    harness.run()
    assert isinstance(harness.failed["r"], StepError)


def test_masks_are_given_the_likeliest_tokens_at_their_places() -> None:
    harness = Harness(num_blocks=8, **ENCODER)
    text = (3, 1, 4, 1, 5)
    reading = PoolingParams(texts=(text,), masks=(1, 3))
    harness.submit(Request(request_id="r", pooling=reading, max_new_tokens=0, prompt_logprobs=3))
    harness.run()
    first, second = harness.prompts["r"]
    for place, report in ((1, first), (3, second)):
        expected_V = log_probabilities(logits_after([*text, place]))
        assert report.token_id == 1
        assert [each.token_id for each in report.top] == np.argsort(-expected_V)[:3].tolist()
        for each in report.top:
            assert math.isclose(each.logprob, expected_V[each.token_id], abs_tol=1e-5)
    assert not harness.vectors["r"]
    assert ("r", 0) in harness.finished
