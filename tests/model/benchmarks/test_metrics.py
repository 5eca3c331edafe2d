"""Figures of hand-made items whose right values are known."""

import math

import pytest

from quill.model.benchmarks.metrics import (
    Likelihood,
    cut,
    is_number_right,
    judge_choice,
    summarize,
)


def test_acc_takes_the_likeliest_choice_and_acc_norm_the_likeliest_by_character() -> None:
    found = [Likelihood(-4.0, False), Likelihood(-5.0, False)]
    scores = judge_choice(found, [" ab", " abcdefghij"], gold=1)
    assert (scores["acc"], scores["acc_norm"]) == (0.0, 1.0)  # -4/2 against -5/10
    assert judge_choice(found, [" ab", " abcdefghij"], gold=0)["acc"] == 1.0


def test_the_separating_space_is_no_part_of_a_choice() -> None:
    found = [Likelihood(-3.0, False), Likelihood(-3.9, False)]
    scores = judge_choice(found, [" abc", " abcd"], gold=1)
    assert scores["acc_norm"] == 1.0  # -3/3 < -3.9/4, though -3/4 > -3.9/5


def test_lambada_counts_words_that_greedy_decoding_writes() -> None:
    assert judge_choice([Likelihood(-1.0, True)], [" word"], 0)["exact"] == 1.0
    assert judge_choice([Likelihood(-0.1, False)], [" word"], 0)["exact"] == 0.0


def test_a_perplexity_is_of_the_mean_log_likelihood() -> None:
    figure = summarize("perplexity", [-1.0, -3.0])
    assert figure.value == pytest.approx(math.exp(2.0))
    assert figure.low == pytest.approx(math.exp(1.0))
    assert figure.high == pytest.approx(math.exp(3.0))
    assert figure.interval == "bootstrap"


@pytest.mark.parametrize(
    ("num_right", "num_items", "low", "high"),
    # From tables of Wilson's score interval at 95%.
    [
        (5, 10, 0.2366, 0.7634),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_shares_have_wilsons_interval(
    num_right: int, num_items: int, low: float, high: float
) -> None:
    figure = summarize("acc", [1.0] * num_right + [0.0] * (num_items - num_right))
    assert figure.value == num_right / num_items
    assert (figure.low, figure.high) == pytest.approx((low, high), abs=5e-5)
    assert figure.interval == "Wilson"


def test_means_of_samples_have_a_bootstrap_interval_that_is_the_same_each_time() -> None:
    values = [0.0, 0.25, 0.5, 1.0] * 25
    figure = summarize("pass@1", values)
    assert figure == summarize("pass@1", values)
    spread = 1.96 * math.sqrt(0.1366 / 100)
    assert figure.value == pytest.approx(0.4375)
    assert (figure.low, figure.high) == pytest.approx((0.4375 - spread, 0.4375 + spread), abs=0.01)


@pytest.mark.parametrize(
    ("text", "expected", "is_right"),
    [
        ("6 + 5 = 11. So the answer is 11.", "11", True),
        ("The total is $1,234.50", "1234.5", True),
        ("#### 1,000", "1000", True),
        ("It fell to -3 degrees", "-3", True),
        ("11, or rather 12", "11", False),
        ("I don't know", "11", False),
    ],
)
def test_the_last_number_counts(text: str, expected: str, is_right: bool) -> None:
    assert is_number_right(text, expected) == is_right


def test_a_text_ends_at_its_first_stop_string() -> None:
    assert cut("ab\nclass\ndef", ["\ndef", "\nclass"]) == "ab"
    assert cut("ab", ["\ndef"]) == "ab"
