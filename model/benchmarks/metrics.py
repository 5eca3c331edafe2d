"""Judges answers, and sums judgements up to figures with 95% confidence intervals.

Knows: lm-evaluation-harness's definitions, text, statistics. Does not know: models, files.

acc        the gold continuation has the highest log-likelihood
acc_norm   likewise with log-likelihoods divided by the continuations' lengths in characters
exact      every token of the continuation is the model's likeliest (LAMBADA's accuracy)
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_Z = 1.959964  # of a normal distribution's middle 95%
_NUM_RESAMPLES = 2000
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Likelihood(NamedTuple):
    """Of a continuation."""

    log_likelihood: float
    is_greedy: bool


class Figure(NamedTuple):
    """A metric over all items of a task."""

    value: float
    low: float
    high: float
    interval: str


def judge_choice(
    likelihoods: Sequence[Likelihood], continuations: Sequence[str], gold: int
) -> dict[str, float]:
    totals = [each.log_likelihood for each in likelihoods]
    lengths = [max(len(each.removeprefix(" ")), 1) for each in continuations]
    means = [total / length for total, length in zip(totals, lengths, strict=True)]
    return {
        "acc": float(totals.index(max(totals)) == gold),
        "acc_norm": float(means.index(max(means)) == gold),
        "exact": float(likelihoods[gold].is_greedy),
        "perplexity": totals[gold],
    }


def is_number_right(text: str, expected: str) -> bool:
    """Compares the last number of a text."""
    found = _NUMBER.findall(text)
    return bool(found) and _value(found[-1]) == _value(expected)


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def cut(text: str, stop: Sequence[str]) -> str:
    """The text up to the first stop string."""
    return text[: min((at for each in stop if (at := text.find(each)) >= 0), default=len(text))]


def summarize(metric: str, values: Sequence[float]) -> Figure:
    """Wilson's interval for shares of items; a bootstrap over items for everything else."""
    if metric == "perplexity":
        logs = _bootstrap(values)
        low, value, high = (math.exp(-each) for each in (logs.high, logs.value, logs.low))
        return Figure(value, low, high, logs.interval)
    if all(value in (0.0, 1.0) for value in values):
        return _wilson(sum(values), len(values))
    return _bootstrap(values)


def _wilson(num_right: float, num_items: int) -> Figure:
    share, z2 = num_right / num_items, _Z * _Z / num_items
    middle = (share + z2 / 2) / (1 + z2)
    half = _Z / (1 + z2) * math.sqrt(share * (1 - share) / num_items + z2 / (4 * num_items))
    return Figure(share, max(middle - half, 0.0), min(middle + half, 1.0), "Wilson")


def _bootstrap(values: Sequence[float]) -> Figure:
    samples, generator = np.asarray(values), np.random.default_rng(0)
    means = [generator.choice(samples, len(samples)).mean() for _ in range(_NUM_RESAMPLES)]
    low, high = np.percentile(means, (2.5, 97.5))
    return Figure(float(samples.mean()), float(low), float(high), "bootstrap")
