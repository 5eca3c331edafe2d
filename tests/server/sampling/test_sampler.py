"""Tokens, logprobs and random numbers are those of the reference, always."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quill.model import randomness
from quill.model.randomness import uniform
from quill.model.reference import sampling as reference
from quill.model.reference.sampling import log_probabilities
from quill.server.request import SamplingParams
from quill.server.sampling import native, sampler
from quill.server.sampling.sampler import (
    Adjustments,
    SamplerInput,
    position_logprobs,
    sample,
    sequence_seed,
    uniforms,
)

pytestmark = pytest.mark.portable

ROOT = Path(__file__).parents[3]

# R rows · V vocabulary

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Row:
    """A row as a test describes it."""

    sampling: dict[str, Any]
    seed: int = 0
    prompt: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()
    banned: frozenset[int] = frozenset()
    allowed: frozenset[int] | None = None  # None: every token

    def mask(self, vocab_size: int) -> npt.NDArray[np.bool_] | None:
        return None if self.allowed is None else np.isin(np.arange(vocab_size), [*self.allowed])


def fast(logits_RV: Logits, rows: list[Row]) -> list[int]:
    choices = sample(logits_RV, [_draw(row, logits_RV.shape[1]) for row in rows])
    assert not choices.not_finite
    return choices.tokens


def _draw(row: Row, vocab_size: int) -> SamplerInput:
    sampling = SamplingParams(**row.sampling)
    adjustments = None
    if sampling.adjusts or row.banned:
        adjustments = Adjustments(sampling, row.prompt, len(row.generated) + 1, row.banned)
        for token in row.generated:
            adjustments.add(token)
    return SamplerInput(
        sampling, row.seed, len(row.generated), adjustments, _bits(row.mask(vocab_size))
    )


def _bits(mask_V: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.uint32] | None:
    if mask_V is None:
        return None
    padded = np.pad(mask_V, (0, -len(mask_V) % 32), constant_values=True)  # nobody looks there
    return np.packbits(padded, bitorder="little").view(np.uint32)


def slow(logits_RV: Logits, rows: list[Row]) -> list[int]:
    return [
        reference.choose(
            logits_V,
            reference.SamplingParameters(
                **row.sampling,
                stop_ids=row.banned,
                max_new_tokens=len(row.generated) + 1,
                min_new_tokens=len(row.generated) + 1,
            ),
            list(row.prompt),
            list(row.generated),
            uniform(row.seed, len(row.generated)),
            row.mask(len(logits_V)),
        )
        for logits_V, row in zip(logits_RV, rows, strict=True)
    ]


TEMPERATURES = st.sampled_from([0.0, 5e-324, 1e-40, 1e-3, 0.3, 0.8, 1.0, 1.7, 50.0, 1e35, 1e300])
SAMPLINGS = st.fixed_dictionaries(
    {"temperature": TEMPERATURES},
    optional={
        "top_k": st.sampled_from([1, 2, 5, 40, 500, 600, 10**9, 10**30]),
        "top_p": st.sampled_from([1e-9, 0.25, 0.5, 0.9, 0.95, 0.999, 1 - 1e-12, 1.0]),
        "min_p": st.sampled_from([0.0, 1e-300, 1e-6, 0.05, 0.5, 1.0]),
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
    banned = draw(st.frozensets(st.integers(1, vocab_size), max_size=4)) - {vocab_size}
    seed, allowed = draw(st.integers(0, 2**64 - 1)), None
    if draw(st.booleans()):
        rng = np.random.default_rng(seed)
        share = draw(st.sampled_from([0.0, 0.001, 0.5, 0.99]))
        allowed = frozenset({0, *np.flatnonzero(rng.random(vocab_size) < share).tolist()})
    return Row(sampling, seed, draw(tokens), draw(tokens), banned, allowed)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Logits, list[Row]]:
    vocab_size = draw(st.sampled_from([1, 2, 7, 63, 64, 65, 1025, 2100, 5000]))
    some = draw(st.lists(rows(vocab_size), min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits_RV = rng.normal(size=(len(some), vocab_size)) * draw(st.sampled_from([0.1, 2.0, 8.0]))
    coarse = draw(st.sampled_from([None, 0, 1]))  # rounding makes ties
    if coarse is not None:
        logits_RV = logits_RV.round(coarse)
    if draw(st.booleans()):
        logits_RV[rng.random(logits_RV.shape) < 0.3] = -np.inf
        logits_RV[:, rng.integers(vocab_size)] = draw(st.sampled_from([0.0, 12.0]))
        logits_RV[:, 0] = np.maximum(logits_RV[:, 0], -30)  # which is never banned
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


def test_sequence_chooses_the_same_in_any_batch() -> None:
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


@pytest.mark.parametrize("num_threads", [1, 2, 16])
def test_every_token_of_a_large_vocabulary_is_the_reference_one(num_threads: int) -> None:
    rng = np.random.default_rng(num_threads)
    native.prepare(num_threads)
    cuts: list[dict[str, Any]] = [
        *({}, {}, {"temperature": 0.3}, {"temperature": 2.0}, {"temperature": 0.0}),
        *({"top_p": 0.95}, {"min_p": 0.001}, {"top_k": 40, "top_p": 0.95}, {"top_k": 5000}),
        *({"top_p": 0.9, "min_p": 1e-4}, {"repetition_penalty": 1.2}, {"frequency_penalty": 0.1}),
    ]
    prompt = tuple(rng.integers(60_000, size=3000).tolist())
    answer = tuple(rng.integers(60_000, size=1500).tolist())
    likely = rng.integers(60_000, size=20)
    some = [
        Row(
            cut,
            int(rng.integers(2**63)),
            prompt,
            answer if "frequency_penalty" in cut else (),
            frozenset(likely[:9].tolist()) if number % 2 else frozenset(),
            frozenset(rng.integers(60_000, size=[2, 40, 50_000][number % 5]).tolist())
            if number % 5 < 3
            else None,
        )
        for number, cut in enumerate(cuts)
    ]
    logits_RV = (rng.normal(size=(len(some), 60_000)) * 2.5).astype(np.float32)
    logits_RV[:, likely] += 8
    try:
        assert fast(logits_RV, some) == slow(logits_RV, some)
    finally:
        native.prepare()


def test_many_steps_at_once_do_not_disturb_each_other() -> None:
    """An engine that is being replaced is still running."""
    rng = np.random.default_rng(5)
    native.prepare(4)
    logits_RV = (rng.normal(size=(16, 30_000)) * 2).astype(np.float32)
    some = [Row({"temperature": 1.0}, seed) for seed in range(16)]
    expected = slow(logits_RV, some)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: fast(logits_RV, some), range(40)))
    finally:
        native.prepare()
    assert all(each == expected for each in found)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab_size", [3, 5000])
@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_rows_that_are_not_finite_are_named_and_spoil_no_others(
    temperature: float, vocab_size: int, penalty: float
) -> None:
    logits_RV = np.random.default_rng(0).normal(size=(6, vocab_size)).astype(np.float32)
    logits_RV[1, 1] = np.nan
    logits_RV[2, -1] = np.inf
    logits_RV[4] = -np.inf
    logits_RV[5, 0] = -np.inf  # allowed
    row = Row({"temperature": temperature, "repetition_penalty": penalty}, 1, (1,), (0, 2))
    choices = sample(logits_RV, [_draw(row, vocab_size)] * 6)
    assert choices.not_finite == {1, 2, 4}
    good = [0, 3, 5]
    assert [choices.tokens[i] for i in good] == slow(logits_RV[good], [row] * 3)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.5}])
@pytest.mark.parametrize("bias", [{}, {"logit_bias": {7: 100.0}}])
def test_the_only_token_that_may_be_chosen_is(
    sampling: dict[str, Any], bias: dict[str, Any]
) -> None:
    logits_RV = np.random.default_rng(2).normal(size=(3, 5000)).astype(np.float32)
    logits_RV[0, 4990] = -80
    only = Row({**sampling, **bias}, 3, allowed=frozenset({4990}))
    assert fast(logits_RV, [only] * 3) == [4990] * 3
    nothing = Row({**sampling, **bias}, 3, allowed=frozenset({12}))
    logits_RV[1, 12] = -np.inf
    assert sample(logits_RV, [_draw(nothing, 5000)] * 3).not_finite == {1}


def test_samples_may_share_logits_and_leave_it_as_it_was() -> None:
    logits_RV = np.random.default_rng(3).normal(size=(3, 4000)).astype(np.float32)
    before = logits_RV.copy()
    some = [Row({"repetition_penalty": 2.0}, seed, (seed, 7)) for seed in range(5)]
    rows = [2, 0, 2, 2, 0]
    tokens = sample(logits_RV, [_draw(row, 4000) for row in some], rows).tokens
    assert tokens == slow(logits_RV[rows], some)
    assert (logits_RV == before).all()


def test_logits_may_be_any_part_of_an_array() -> None:
    logits_RV = np.random.default_rng(4).normal(size=(8, 3000)).astype(np.float32)
    some = [Row({}, seed) for seed in range(4)]
    for part_RV in (logits_RV[::2], logits_RV[::-2], logits_RV[:4, ::3], logits_RV[:4, 5:900]):
        assert fast(part_RV, some) == slow(part_RV, some)


def test_a_token_that_is_none_is_an_error() -> None:
    with pytest.raises(IndexError):
        fast(np.zeros((1, 5), np.float32), [Row({"logit_bias": {5: 1.0}})])


PORTABLE = """
import sys, numpy as np
from tests.server.sampling.test_sampler import fast, Row
rng = np.random.default_rng(0)
logits_RV = (rng.normal(size=(16, 20011)) * 3).astype(np.float32)
cuts = [{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.01}, {"temperature": 2.0}, {"top_k": 900},
    {"temperature": 0.0}, {"repetition_penalty": 1.3}] * 2
print(fast(logits_RV, [Row(cut, seed, (1, 2, 3)) for seed, cut in enumerate(cuts)]))
from quill.server.sampling.native import tops
found = tops(logits_RV, range(16), [5] * 16)
print(found.ids_RT.tolist(), found.log_totals_R.tolist())
"""


def test_all_kernels_give_the_same_tokens_and_the_same_totals() -> None:
    said = [
        subprocess.run(
            [sys.executable, "-c", PORTABLE],
            env=os.environ | {"QUILL_KERNELS": kernels, "PYTHONPATH": "."},
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout
        for kernels in ("plain", "avx2", "avxvnni", "avx512")
    ]  # fmt: skip
    assert said[0].strip()
    assert len(set(said)) == 1


def test_typical_tokens_are_rarely_sampled_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    exact: list[object] = []

    def counted(*arguments: Any) -> int:
        exact.append(arguments)
        return real(*arguments)

    real = sampler.sample_exactly
    monkeypatch.setattr(sampler, "sample_exactly", counted)
    rng = np.random.default_rng(2)
    # About as peaked as a language model's: a Zipf-like head, and noise.
    logits_RV = (-1.5 * np.log(np.arange(1, 20001)) + rng.normal(size=(64, 20000)) / 4).astype("f4")
    for cut in ({"top_k": 50, "top_p": 0.95}, {"top_p": 0.9}, {"min_p": 0.05}, {}, {"top_k": 900}):
        some = [Row({"temperature": 0.8, **cut}, seed) for seed in range(64)]
        assert fast(logits_RV, some) == slow(logits_RV, some)
    assert not exact


@pytest.mark.parametrize("vocab_size", [5, 25, 1000, 40_000])
def test_logprobs_are_of_the_models_own_distribution(vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    logits_RV = (rng.normal(size=(3, vocab_size)) * 4).astype(np.float32)
    tokens, num_tops = [0, 4, 2], [0, 3, 20]
    answers = position_logprobs(logits_RV, tokens, num_tops)
    for logits_V, token, num_top, answer in zip(logits_RV, tokens, num_tops, answers, strict=True):
        expected_V = log_probabilities(logits_V)
        best = np.argsort(-expected_V, kind="stable")[:num_top]
        assert answer.token_id == token
        assert answer.logprob == pytest.approx(expected_V[token], abs=1e-12)
        assert [each.token_id for each in answer.top] == best.tolist()
        assert [each.logprob for each in answer.top] == pytest.approx(expected_V[best], abs=1e-12)


def test_lowest_id_comes_first_among_equals() -> None:
    answer = position_logprobs(np.zeros((1, 30_000), np.float32), [7], [4])[0]
    assert [each.token_id for each in answer.top] == [0, 1, 2, 3]


def test_rows_may_be_chosen_and_those_that_are_not_finite_are_named() -> None:
    logits_RV = np.random.default_rng(1).normal(size=(4, 300)).astype(np.float32)
    logits_RV[1, 3] = np.nan
    logits_RV[3, :] = -np.inf
    logits_RV[2, 5:] = -np.inf
    tops = native.tops(logits_RV, [2, 1, 3, 2], [9, 9, 9, 2])
    assert tops.not_finite == [1, 2]
    assert tops.num_R.tolist() == [5, 0, 0, 2], "-inf is never among them"
    one, other = position_logprobs(logits_RV, [4, 7], [1, 0], [2, 0])
    assert one.top[0].token_id == logits_RV[2].argmax()
    assert other.logprob == pytest.approx(log_probabilities(logits_RV[0])[7], abs=1e-12)


SEEDS = st.integers(0, 2**64 - 1)
POSITIONS = st.integers(0, 2**31)


@given(st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=8))
def test_uniforms_are_the_reference_ones(pairs: list[tuple[int, int]]) -> None:
    seeds, positions = zip(*pairs, strict=True)
    assert uniforms(seeds, positions).tolist() == [randomness.uniform(*pair) for pair in pairs]


@given(SEEDS, st.integers(0, 1000))
def test_sequence_seeds_are_the_reference_ones(seed: int, index: int) -> None:
    assert sequence_seed(seed, index) == randomness.sequence_seed(seed, index)
