"""The rules of choosing a token, each by itself and all in order."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quill.model.errors import RequestError
from quill.model.randomness import uniform
from quill.model.reference.sampling import (
    Candidates,
    FloatArray,
    SamplingParameters,
    choose,
    log_probabilities,
    penalize,
    sample,
    truncate,
)


def logits_of(probabilities: Sequence[float]) -> FloatArray:
    logits_V: FloatArray = np.log(np.array(probabilities, dtype=np.float64))
    return logits_V


def kept(probabilities: Sequence[float], **settings: Any) -> list[int]:
    candidates = truncate(logits_of(probabilities), SamplingParameters(**settings))
    return [int(token) for token in candidates.ids_C]


def shares(scores: Sequence[float], temperature: float) -> list[float]:
    weights_C = truncate(np.array(scores), SamplingParameters(temperature=temperature)).weights_C
    return [round(weight, 2) for weight in (weights_C / weights_C.sum()).tolist()]


def test_softmax_with_temperature_as_in_the_textbook() -> None:
    # Logits 3, 2, 1, 0: at a low temperature the best takes nearly all, at a high one all share.
    assert shares([3, 2, 1, 0], 1.0) == [0.64, 0.24, 0.09, 0.03]
    assert shares([3, 2, 1, 0], 0.5) == [0.86, 0.12, 0.02, 0.0]
    assert shares([3, 2, 1, 0], 2.0) == [0.46, 0.28, 0.17, 0.1]
    assert shares([3, 2, 1, 0], 100.0) == [0.25, 0.25, 0.25, 0.25]


def test_a_mask_goes_before_the_cuts_and_the_sample() -> None:
    logits_V, mask_V = logits_of([0.6, 0.2, 0.15, 0.05]), np.array([False, True, False, True])
    for parameters in (SamplingParameters(temperature=0), SamplingParameters(top_k=1)):
        assert choose(logits_V, parameters, [], [], 0.9, mask_V) == 1
    drawn = [choose(logits_V, SamplingParameters(), [], [], u, mask_V) for u in (0, 0.79, 0.81)]
    assert drawn == [1, 1, 3]


def test_log_probabilities_are_the_log_softmax_of_the_raw_logits() -> None:
    log_probs = log_probabilities(np.array([1000.0, 1001.0, 1002.0], dtype=np.float32))
    assert np.exp(log_probs) == pytest.approx([0.0900306, 0.2447285, 0.6652410], abs=1e-7)


def test_logit_bias_is_added_after_the_penalties() -> None:
    parameters = SamplingParameters(repetition_penalty=2.0, logit_bias={0: 3.0, 1: -100.0})
    assert penalize(np.array([4.0, 4.0]), parameters, [0], []).tolist() == [5.0, -96.0]


def test_tokens_that_end_an_answer_are_out_of_the_question_until_it_is_long_enough() -> None:
    parameters = SamplingParameters(
        temperature=0, logit_bias={1: 100.0}, stop_ids=frozenset({1}), min_new_tokens=2
    )
    logits = np.array([1.0, 5.0, 2.0])
    assert penalize(logits, parameters, [], [2]).tolist() == [1.0, -math.inf, 2.0]
    answer: list[int] = []
    for _ in range(3):
        answer.append(choose(logits, parameters, [], answer, 0.0))
    assert answer == [2, 2, 1]


def test_logits_given_are_left_as_they_were() -> None:
    logits = np.array([1.0, 2.0])
    penalize(logits, SamplingParameters(repetition_penalty=2.0), [0, 1], [])
    assert logits.tolist() == [1.0, 2.0]


def test_greedy_takes_the_lowest_id_among_equals_after_penalties() -> None:
    greedy = SamplingParameters(temperature=0.0)
    assert choose(np.array([1.0, 3.0, 3.0]), greedy, [], [], 0.99) == 1
    penalised = SamplingParameters(temperature=0.0, presence_penalty=1.0)
    assert choose(np.array([1.0, 3.0, 3.0]), penalised, [], [1], 0.0) == 2


def test_top_k_keeps_exactly_k_and_the_lower_ids_among_equals() -> None:
    assert kept([0.2, 0.3, 0.2, 0.3], top_k=1) == [1]
    assert kept([0.2, 0.3, 0.2, 0.3], top_k=3) == [1, 3, 0]
    assert kept([0.2, 0.3, 0.2, 0.3], top_k=100) == [1, 3, 0, 2]


def test_top_p_keeps_the_token_that_crosses() -> None:
    assert kept([0.5, 0.25, 0.125, 0.125], top_p=0.4) == [0]
    assert kept([0.5, 0.25, 0.125, 0.125], top_p=0.6) == [0, 1]
    assert kept([0.5, 0.25, 0.125, 0.125], top_p=0.8) == [0, 1, 2]
    assert kept([0.5, 0.25, 0.125, 0.125], top_p=1e-9) == [0]


def test_top_p_is_of_what_top_k_left() -> None:
    # The best token has 0.4 of the whole, but 0.4 / 0.7 = 0.571 of the first two.
    assert kept([0.4, 0.3, 0.2, 0.1], top_p=0.57) == [0, 1]
    assert kept([0.4, 0.3, 0.2, 0.1], top_p=0.57, top_k=2) == [0]
    assert kept([0.4, 0.3, 0.2, 0.1], top_p=0.58, top_k=2) == [0, 1]


def test_sampling_walks_the_candidates_best_first() -> None:
    candidates = Candidates(np.array([7, 3, 9]), np.array([1.0, 0.5, 0.5]))
    assert [sample(candidates, u) for u in (0.0, 0.49, 0.5, 0.74, 0.75)] == [7, 7, 3, 3, 9]
    assert sample(candidates, 1 - 2.0**-53) == 9


def test_frequencies_of_samples_follow_the_probabilities() -> None:
    logits = logits_of([0.5, 0.3, 0.15, 0.05])
    parameters = SamplingParameters()
    drawn = Counter(choose(logits, parameters, [], [], uniform(3, n)) for n in range(4000))
    expected = np.array([2000, 1200, 600, 200])
    counts = np.array([drawn[token] for token in range(4)])
    # Chi-squared with 3 degrees of freedom exceeds 16.3 once in a thousand.
    assert ((counts - expected) ** 2 / expected).sum() < 16.3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", math.nan),
        ("presence_penalty", -2.1),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {3: math.nan}),
        ("max_new_tokens", 0),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"^{name} is .*; it must be "):
        SamplingParameters(**{name: value})  # type: ignore[arg-type]


LOGITS = st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40)
PARAMETERS = st.builds(
    SamplingParameters,
    temperature=st.floats(0, 5),
    top_k=st.integers(0, 50),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.5, 2),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
)


@settings(derandomize=True)
@given(LOGITS, PARAMETERS, st.floats(0, 1, exclude_max=True), st.data())
def test_any_parameters_choose_as_a_plain_loop_does(
    values: list[float], parameters: SamplingParameters, u: float, data: st.DataObject
) -> None:
    tokens = st.lists(st.integers(0, len(values) - 1), max_size=8)
    prompt_ids, generated_ids = data.draw(tokens), data.draw(tokens)
    chosen = choose(np.array(values, dtype=np.float32), parameters, prompt_ids, generated_ids, u)
    assert chosen == _choose_by_loops(values, parameters, prompt_ids, generated_ids, u)


def _choose_by_loops(
    values: list[float],
    parameters: SamplingParameters,
    prompt_ids: list[int],
    generated_ids: list[int],
    u: float,
) -> int:
    """The module's docstring once more, with no arrays."""
    scores = []
    for token, score in enumerate(values):
        if token in prompt_ids or token in generated_ids:
            r = parameters.repetition_penalty
            score = score / r if score > 0 else score * r
        if token in generated_ids:
            n = generated_ids.count(token)
            score -= parameters.frequency_penalty * n + parameters.presence_penalty
        scores.append(score)
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if parameters.temperature == 0:
        return order[0]
    best = scores[order[0]]
    weight = {
        token: float(np.exp(_divide(scores[token] - best, parameters.temperature)))
        for token in order
    }
    order = order[: parameters.top_k or None]
    if parameters.top_p < 1:
        order = order[: _first_sum(order, weight, lambda s, total: s >= parameters.top_p * total)]
    order = [token for token in order if weight[token] >= parameters.min_p]
    return order[_first_sum(order, weight, lambda s, total: s > u * total) - 1]


def _first_sum(
    order: list[int], weight: dict[int, float], is_enough: Callable[[float, float], bool]
) -> int:
    """How many candidates it takes until the sum of their weights is enough of the total."""
    sums = list(itertools.accumulate(weight[token] for token in order))
    return 1 + next(index for index, s in enumerate(sums) if is_enough(s, sums[-1]))


def _divide(numerator: float, temperature: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float64(numerator) / temperature)
