"""Beam search: `transformers` finds the same answers with the same scores."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quill.model.errors import RequestError
from quill.model.importers.huggingface_directory import read_huggingface
from quill.model.network.config import ModelConfig
from quill.model.reference.beam_search import BeamParameters, beam_search
from quill.model.reference.generate import generate
from quill.model.reference.sampling import SamplingParameters
from tests.model.huggingface_models import (
    EOS,
    PAD,
    gpt2,
    llama,
    marian,
    randomised,
    saved,
    their_search,
)
from tests.tiny_networks import randomized, tiny

PROMPT = [3, 1, 4, 1, 5]
LLAMA = tiny(29, 32)
SEQ2SEQ = dataclasses.replace(LLAMA, family="seq2seq", num_encoder_layers=1)


@pytest.mark.parametrize("make", [llama, gpt2, marian])
def test_transformers_finds_the_same_answers_with_the_same_scores(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    theirs = make()
    if make is not marian:
        randomised(theirs, 0.3)
    ours = read_huggingface(saved(theirs, tmp_path)).build()
    source = [*PROMPT, EOS] if make is marian else None
    prompt = PROMPT if source is None else [PAD]
    kinds = itertools.product((1.0, 2.5, -1.0), (False, True, "never"), (2, 4))
    num_stopped = 0
    likely, *_ = beam_search(
        ours, prompt, BeamParameters(max_new_tokens=9), source_ids=source, cached=True
    )
    stops = [frozenset[int](), frozenset({likely.token_ids[3]}), frozenset(range(0, 300, 6))]
    for length_penalty, early_stopping, num_beams in kinds:
        for stop_ids in stops:
            options: dict[str, Any] = {
                "num_beams": num_beams,
                "length_penalty": length_penalty,
                "early_stopping": early_stopping,
                "num_return_sequences": num_beams,
                "max_new_tokens": 9,
            }
            parameters = BeamParameters(**options, stop_ids=stop_ids)
            found = beam_search(ours, prompt, parameters, source_ids=source, cached=True)
            expected = their_search(theirs, source or prompt, stop_ids, **options)
            assert [each.token_ids for each in found] == [ids for ids, _ in expected], parameters
            scores = [score for _, score in expected]
            assert [each.score for each in found] == pytest.approx(scores, abs=1e-4)
            num_stopped += sum(each.finish_reason == "stop" for each in found)
    assert num_stopped > 20


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_cached_and_uncached_find_the_same_answers(early_stopping: Any) -> None:
    parameters = BeamParameters(
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=8,
        stop_ids=frozenset({7, 11}),
        early_stopping=early_stopping,
    )
    for config, source_ids in ((LLAMA, None), (SEQ2SEQ, [9, 8, 7, 6])):
        model = randomized(config, 0.35)
        cached, uncached = (
            beam_search(model, PROMPT, parameters, source_ids=source_ids, cached=cached)
            for cached in (True, False)
        )
        assert [a.token_ids for a in cached] == [a.token_ids for a in uncached]
        assert [a.score for a in cached] == pytest.approx([a.score for a in uncached], abs=1e-4)


def test_one_beam_is_greedy() -> None:
    model, stop_ids = randomized(LLAMA, 0.35), frozenset({7})
    greedy = SamplingParameters(temperature=0.0, max_new_tokens=10, stop_ids=stop_ids)
    expected = generate(model, PROMPT, greedy)
    parameters = BeamParameters(num_beams=1, max_new_tokens=10, stop_ids=stop_ids)
    (found,) = beam_search(model, PROMPT, parameters)
    assert found.token_ids == expected.token_ids
    assert found.logprob == pytest.approx(sum(expected.logprobs))
    assert found.finish_reason == expected.finish_reason


@torch.no_grad()
@pytest.mark.parametrize("config", [LLAMA, SEQ2SEQ], ids=["causal", "seq2seq"])
def test_a_beam_as_wide_as_all_answers_finds_the_best_ones(config: ModelConfig) -> None:
    model = randomized(dataclasses.replace(config, vocab_size=5), 0.35)
    source_ids = [2, 3] if config.family == "seq2seq" else None
    parameters = BeamParameters(num_beams=125, num_return_sequences=6, max_new_tokens=3)
    found = beam_search(model, [1], parameters, source_ids=source_ids, cached=True)
    cross = None
    if source_ids is not None:
        cross = model.encode(torch.tensor([source_ids]), torch.ones(1, 2, dtype=torch.bool))
    logprob = {}
    for answer in itertools.product(range(5), repeat=3):
        log_probs = model(torch.tensor([[1, *answer[:-1]]]), cross)[0].log_softmax(dim=-1)
        logprob[answer] = sum(log_probs[n, token].item() for n, token in enumerate(answer))
    best = sorted(logprob, key=lambda answer: -logprob[answer])[:6]
    assert [answer.token_ids for answer in found] == best
    for hypothesis in found:
        assert hypothesis.logprob == pytest.approx(logprob[hypothesis.token_ids], abs=1e-4)
        assert hypothesis.score == pytest.approx(hypothesis.logprob / 3)


def test_a_higher_length_penalty_favours_longer_answers() -> None:
    model = randomized(LLAMA, 0.35)
    lengths = []
    for length_penalty in (-3.0, 0.0, 3.0):
        parameters = BeamParameters(
            length_penalty=length_penalty, max_new_tokens=12, stop_ids=frozenset(range(10))
        )
        lengths.append(len(beam_search(model, PROMPT, parameters, cached=True)[0].token_ids))
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_prompt_and_answer_together_fit_into_the_context() -> None:
    model = randomized(LLAMA, 0.35)
    parameters = BeamParameters(num_beams=2, max_new_tokens=1000)
    (answer,) = beam_search(model, [1] * 28, parameters, cached=True)
    assert len(answer.token_ids) == LLAMA.context - 28
    assert answer.finish_reason == "length"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 0),
        ("length_penalty", math.nan),
        ("length_penalty", 11.0),
        ("early_stopping", "always"),
        ("num_return_sequences", 0),
        ("num_return_sequences", 5),
        ("max_new_tokens", 0),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"^{name} is {value}; it must be "):
        BeamParameters(**{name: value})  # type: ignore[arg-type]
