"""The reference decoder: cached or not the same answer, by the rules, within its limits."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from quill.model.errors import CheckpointError, RequestError
from quill.model.network.transformer import Transformer
from quill.model.randomness import uniform
from quill.model.reference.generate import Generation, generate
from quill.model.reference.sampling import SamplingParameters
from tests.tiny_networks import randomized, tiny

CAUSAL = tiny(31, 24)
SEQ2SEQ = dataclasses.replace(
    CAUSAL, family="seq2seq", num_encoder_layers=2, positions="sinusoidal", norm_placement="post"
)
PROMPT = [3, 1, 4, 1, 5]
GREEDY = SamplingParameters(temperature=0.0, max_new_tokens=12)
EVERYTHING = SamplingParameters(
    temperature=0.9,
    top_k=20,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.3,
    frequency_penalty=0.2,
    presence_penalty=0.1,
    logit_bias={7: 1.5, 3: -100.0},
    max_new_tokens=12,
)


@pytest.fixture(scope="module")
def causal() -> Transformer:
    return randomized(CAUSAL)


@pytest.fixture(scope="module")
def seq2seq() -> Transformer:
    return randomized(SEQ2SEQ)


def assert_same(left: Generation, right: Generation) -> None:
    assert left.token_ids == right.token_ids
    assert left.logprobs == pytest.approx(right.logprobs, abs=1e-4)
    assert left.finish_reason == right.finish_reason


@pytest.mark.parametrize("parameters", [GREEDY, EVERYTHING], ids=["greedy", "everything"])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary"])
def test_cached_and_uncached_give_the_same_answer(
    parameters: SamplingParameters, positions: Any
) -> None:
    model = randomized(dataclasses.replace(CAUSAL, positions=positions))
    for seed in range(3):
        uncached = generate(model, PROMPT, parameters, seed)
        assert_same(generate(model, PROMPT, parameters, seed, cached=True), uncached)


@pytest.mark.parametrize("parameters", [GREEDY, EVERYTHING], ids=["greedy", "everything"])
def test_cached_and_uncached_give_the_same_translation(
    seq2seq: Transformer, parameters: SamplingParameters
) -> None:
    for seed in range(3):
        uncached = generate(seq2seq, [0], parameters, seed, source_ids=PROMPT)
        cached = generate(seq2seq, [0], parameters, seed, source_ids=PROMPT, cached=True)
        assert_same(cached, uncached)


@torch.no_grad()
def test_greedy_takes_the_best_token_each_time(causal: Transformer) -> None:
    sequence = list(PROMPT)
    for _ in range(12):
        sequence.append(int(causal(torch.tensor([sequence]))[0, -1].argmax()))
    assert generate(causal, PROMPT, GREEDY).token_ids == tuple(sequence[5:])


@torch.no_grad()
def test_logprobs_are_of_the_models_own_distribution(causal: Transformer) -> None:
    generation = generate(causal, PROMPT, EVERYTHING, seed=5)
    ids = torch.tensor([[*PROMPT, *generation.token_ids]])
    log_probs = causal(ids)[0].log_softmax(dim=-1)
    expected = [log_probs[n, ids[0, n + 1]].item() for n in range(4, 4 + 12)]
    assert generation.logprobs == pytest.approx(expected, abs=1e-5)


def test_the_same_seed_gives_the_same_answer_and_another_seed_another(causal: Transformer) -> None:
    answers = [generate(causal, PROMPT, EVERYTHING, seed).token_ids for seed in (1, 1, 2)]
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


def test_the_random_number_of_a_token_does_not_depend_on_the_prompt() -> None:
    # All logits are equal, so each token shows its random number: floor(u x vocabulary).
    model = randomized(CAUSAL)
    with torch.no_grad():
        model.embedding.weight.zero_()
    parameters = SamplingParameters(max_new_tokens=6)
    tokens = {generate(model, [1] * length, parameters, 42).token_ids for length in (1, 2, 9)}
    assert tokens == {tuple(int(uniform(42, n) * CAUSAL.vocab_size) for n in range(6))}


def test_a_stop_token_ends_the_answer_and_is_its_last(causal: Transformer) -> None:
    whole = generate(causal, PROMPT, GREEDY)
    stop = whole.token_ids[4]
    stopped = generate(causal, PROMPT, dataclasses.replace(GREEDY, stop_ids=frozenset({stop})))
    first = whole.token_ids.index(stop)
    assert stopped == Generation(whole.token_ids[: first + 1], whole.logprobs[: first + 1], "stop")


@pytest.mark.parametrize("cached", [False, True])
def test_prompt_and_answer_together_fill_the_context_and_no_more(
    causal: Transformer, cached: bool
) -> None:
    parameters = dataclasses.replace(GREEDY, max_new_tokens=1000)
    generation = generate(causal, [1] * 20, parameters, cached=cached)
    assert len(generation.token_ids) == CAUSAL.context - 20
    assert generation.finish_reason == "length"


def test_penalties_reach_the_answer(causal: Transformer) -> None:
    plain = generate(causal, PROMPT, GREEDY).token_ids
    banned = dataclasses.replace(GREEDY, logit_bias={plain[0]: -100.0})
    assert plain[0] not in generate(causal, PROMPT, banned).token_ids
    varied = dataclasses.replace(GREEDY, repetition_penalty=1e6)
    answer = generate(causal, PROMPT, varied).token_ids
    assert len(set(answer)) == len(answer)
    assert not set(answer) & set(PROMPT)


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "the prompt has 0 tokens"),
        ([1] * 24, {}, r"the prompt has 24 tokens.* context of 24"),
        ([31], {}, "there is no token 31; the vocabulary has 31 tokens"),
        ([-1], {}, "there is no token -1"),
        ([1], {"logit_bias": {99: 1.0}}, "there is no token 99"),
        ([1], {"stop_ids": frozenset({99})}, "there is no token 99"),
    ],
)
def test_impossible_requests_are_refused(
    causal: Transformer, prompt: list[int], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        generate(causal, prompt, SamplingParameters(**settings))


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_that_is_no_64_bit_number_is_refused(causal: Transformer, seed: int) -> None:
    with pytest.raises(RequestError, match="the seed is "):
        generate(causal, PROMPT, GREEDY, seed)


def test_only_seq2seq_models_have_a_source(causal: Transformer, seq2seq: Transformer) -> None:
    with pytest.raises(RequestError, match="a causal model was given a source"):
        generate(causal, PROMPT, GREEDY, source_ids=[1])
    with pytest.raises(RequestError, match="a seq2seq model was given no source"):
        generate(seq2seq, PROMPT, GREEDY)
    with pytest.raises(RequestError, match="the source has 25 tokens; it must have from 1 to 24"):
        generate(seq2seq, PROMPT, GREEDY, source_ids=[1] * 25)


def test_damaged_weights_are_an_error() -> None:
    model = randomized(CAUSAL)
    with torch.no_grad():
        model.decoder_norm.get_parameter("weight").fill_(math.nan)
    with pytest.raises(CheckpointError, match="logits aren't finite"):
        generate(model, PROMPT, GREEDY)
