"""The fast sampling chooses the reference's token, always."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quill.model.randomness import uniform
from quill.model.reference import sampling as reference
from quill.server.request import Sampling
from quill.server.sampling import exact_draw, sampler
from quill.server.sampling.penalties import Adjustments
from quill.server.sampling.sampler import Draw, choose

pytestmark = pytest.mark.portable

# R rows · V vocabulary

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Row:
    """A row as a test describes it."""

    sampling: dict[str, Any]
    seed: int = 0
    prompt: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()


def fast(logits_RV: Logits, rows: list[Row]) -> list[int]:
    choices = choose(logits_RV, [_draw(row) for row in rows])
    assert not choices.broken
    return choices.tokens


def _draw(row: Row) -> Draw:
    sampling = Sampling(**row.sampling)
    adjustments = None
    if sampling.adjusts:
        adjustments = Adjustments(sampling, row.prompt, len(row.generated) + 1)
        for token in row.generated:
            adjustments.add(token)
    return Draw(sampling, row.seed, len(row.generated), adjustments)


def slow(logits_RV: Logits, rows: list[Row]) -> list[int]:
    return [
        reference.choose(
            logits_V,
            reference.SamplingParameters(**row.sampling),
            list(row.prompt),
            list(row.generated),
            uniform(row.seed, len(row.generated)),
        )
        for logits_V, row in zip(logits_RV, rows, strict=True)
    ]


TEMPERATURES = st.sampled_from([0.0, 5e-324, 1e-3, 0.3, 0.8, 1.0, 1.7, 50.0, 1e300])
SAMPLINGS = st.fixed_dictionaries(
    {"temperature": TEMPERATURES},
    optional={
        "top_k": st.sampled_from([1, 2, 5, 40, 500, 600, 10**9]),
        "top_p": st.sampled_from([1e-9, 0.25, 0.5, 0.9, 0.95, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.1, 1.3, 4.0]),
        "frequency_penalty": st.sampled_from([-2.0, -0.5, 0.25, 2.0]),
        "presence_penalty": st.sampled_from([-2.0, -0.5, 0.25, 2.0]),
    },
)


@st.composite
def rows(draw: st.DrawFn, vocab_size: int) -> Row:
    tokens = st.lists(st.integers(0, vocab_size - 1), max_size=12).map(tuple)
    sampling: dict[str, Any] = {**draw(SAMPLINGS)}
    biases = st.sampled_from([-100.0, -1.0, 0.5, 3.0, 100.0])
    bias = draw(st.dictionaries(st.integers(0, vocab_size - 1), biases, max_size=3))
    if bias:
        sampling["logit_bias"] = bias
    return Row(sampling, draw(st.integers(0, 2**64 - 1)), draw(tokens), draw(tokens))


@st.composite
def steps(draw: st.DrawFn) -> tuple[Logits, list[Row]]:
    vocab_size = draw(st.sampled_from([1, 2, 7, 50, 2100, 5000]))
    some = draw(st.lists(rows(vocab_size), min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits_RV = rng.normal(size=(len(some), vocab_size)) * draw(st.sampled_from([0.1, 2.0, 8.0]))
    coarse = draw(st.sampled_from([None, 0, 1]))  # rounding makes ties
    if coarse is not None:
        logits_RV = logits_RV.round(coarse)
    return logits_RV.astype(np.float32), some


@settings(max_examples=60, deadline=None)
@given(steps())
def test_every_token_is_the_reference_one(step: tuple[Logits, list[Row]]) -> None:
    logits_RV, some = step
    assert fast(logits_RV, some) == slow(logits_RV, some)


@pytest.mark.parametrize("seed", range(6))
def test_every_token_of_a_full_step_is_the_reference_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    choices: dict[str, list[Any]] = {
        "temperature": [0.0, 0.3, 0.8, 1.0, 1.0, 2.0],
        "top_k": [0, 0, 1, 50, 400, 600],
        "top_p": [1.0, 1.0, 0.95, 0.5],
        "min_p": [0.0, 0.0, 0.02, 0.3],
        "repetition_penalty": [1.0, 1.0, 1.2],
        "presence_penalty": [0.0, 0.0, 0.5],
    }
    some = [
        Row(
            {name: values[rng.integers(len(values))] for name, values in choices.items()},
            int(rng.integers(2**63)),
            tuple(rng.integers(9000, size=100).tolist()),
            tuple(rng.integers(50, size=20).tolist()),
        )
        for _ in range(64)
    ]
    logits_RV = (rng.normal(size=(64, 9000)) * 3).round(seed % 3).astype(np.float32)
    assert fast(logits_RV, some) == slow(logits_RV, some)


@pytest.mark.parametrize("vocab_size", [3, 5000])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cut", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_ties_of_all_tokens_are_broken_as_the_reference_does(
    vocab_size: int, temperature: float, cut: dict[str, Any]
) -> None:
    some = [Row({"temperature": temperature, **cut}, seed) for seed in range(20)]
    logits_RV = np.zeros((20, vocab_size), np.float32)
    assert fast(logits_RV, some) == slow(logits_RV, some)


def test_row_chooses_the_same_in_any_batch() -> None:
    rng = np.random.default_rng(1)
    logits_RV = (rng.normal(size=(8, 3000)) * 3).astype(np.float32)
    some = [
        Row({"temperature": 0.0}),
        Row({"temperature": 1.0}, 1),
        Row({"temperature": 0.8, "top_k": 50, "top_p": 0.95}, 2),
        Row({"temperature": 1.3, "top_p": 0.9}, 3),
        Row({"temperature": 1.0, "repetition_penalty": 1.2}, 4, (1, 2, 3), (7, 7)),
        Row({"temperature": 2.0, "min_p": 0.01}, 5),
        Row({"temperature": 1.0, "top_k": 700}, 6),
        Row({"temperature": 0.0, "frequency_penalty": 1.0}, 7, (), (4, 4, 5)),
    ]
    alone = [fast(logits_RV[i : i + 1], [row])[0] for i, row in enumerate(some)]
    assert fast(logits_RV, some) == alone
    assert fast(logits_RV[::-1], some[::-1]) == alone[::-1]


def test_typical_rows_are_rarely_drawn_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    exact: list[object] = []

    def counted(*arguments: Any) -> int:
        exact.append(arguments)
        return real(*arguments)

    real = exact_draw.draw_exactly
    monkeypatch.setattr(sampler, "draw_exactly", counted)
    rng = np.random.default_rng(2)
    # About as peaked as a language model's: a Zipf-like head, and noise.
    logits_RV = (-1.5 * np.log(np.arange(1, 20001)) + rng.normal(size=(64, 20000)) / 4).astype("f4")
    for cut in ({"top_k": 50, "top_p": 0.95}, {"top_p": 0.9}, {"min_p": 0.05}):
        some = [Row({"temperature": 0.8, **cut}, seed) for seed in range(64)]
        assert fast(logits_RV, some) == slow(logits_RV, some)
    assert len(exact) <= 4
