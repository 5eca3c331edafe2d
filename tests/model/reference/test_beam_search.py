"""Beam search: `transformers` finds the same answers with the same scores."""

import dataclasses
import importlib
import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from quill.model.errors import RequestError
from quill.model.network.config import ModelConfig
from quill.model.network.transformer import Transformer
from quill.model.reference.beam_search import BeamParameters, beam_search
from quill.model.reference.generate import generate
from quill.model.reference.sampling import SamplingParameters
from tests.tiny_networks import tiny

transformers: Any = importlib.import_module("transformers")  # its types are not strict

PROMPT = [3, 1, 4, 1, 5]
VOCAB_SIZE = 29
LLAMA = tiny(VOCAB_SIZE, 32)
GPT2 = dataclasses.replace(
    LLAMA,
    num_kv_heads=4,
    positions="learned",
    norm="layer",
    activation="gelu_tanh",
    qkv_bias=True,
    attention_out_bias=True,
    ff_bias=True,
)
SEQ2SEQ = dataclasses.replace(LLAMA, family="seq2seq", num_encoder_layers=1)


def build(config: ModelConfig, std: float = 0.35) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=std)
    return model


def to_llama(model: Transformer) -> Any:
    c = model.config
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.d_model,
            intermediate_size=c.d_ff,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_kv_heads,
            max_position_embeddings=c.context,
            rms_norm_eps=c.norm_eps,
            rope_theta=c.rotary_base,
            tie_word_embeddings=True,
            pad_token_id=0,
        )
    )
    weights = {"model.embed_tokens.weight": model.embedding.weight}
    weights["model.norm.weight"] = model.decoder_norm.get_parameter("weight")
    for n, layer in enumerate(model.decoder):
        ours, prefix = layer.state_dict(), f"model.layers.{n}."
        width, kv_width = c.num_heads * c.head_size, c.num_kv_heads * c.head_size
        parts = torch.split(ours["attention.qkv.weight"], [width, kv_width, kv_width])
        for name, part in zip("qkv", parts, strict=True):
            weights[f"{prefix}self_attn.{name}_proj.weight"] = part
        weights[f"{prefix}self_attn.o_proj.weight"] = ours["attention.out.weight"]
        gate, up = ours["feed_forward.up.weight"].chunk(2)
        weights[f"{prefix}mlp.gate_proj.weight"] = gate
        weights[f"{prefix}mlp.up_proj.weight"] = up
        weights[f"{prefix}mlp.down_proj.weight"] = ours["feed_forward.down.weight"]
        weights[f"{prefix}input_layernorm.weight"] = ours["attention_residual.norm.weight"]
        after = ours["feed_forward_residual.norm.weight"]
        weights[f"{prefix}post_attention_layernorm.weight"] = after
    return loaded(theirs, weights)


def to_gpt2(model: Transformer) -> Any:
    c = model.config
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=c.vocab_size,
            n_positions=c.context,
            n_embd=c.d_model,
            n_layer=c.num_layers,
            n_head=c.num_heads,
            n_inner=c.d_ff,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )
    names = {
        "attention_residual.norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "feed_forward_residual.norm": "ln_2",
        "feed_forward.up": "mlp.c_fc",
        "feed_forward.down": "mlp.c_proj",
    }
    weights = {
        "transformer.wte.weight": model.embedding.weight,
        "transformer.wpe.weight": model.position_embedding.weight,
        "transformer.ln_f.weight": model.decoder_norm.get_parameter("weight"),
        "transformer.ln_f.bias": model.decoder_norm.get_parameter("bias"),
    }
    for n, layer in enumerate(model.decoder):
        for name, tensor in layer.state_dict().items():
            module, _, kind = name.rpartition(".")
            # GPT-2's projections are stored transposed.
            tensor = tensor.T if tensor.ndim == 2 else tensor
            weights[f"transformer.h.{n}.{names[module]}.{kind}"] = tensor
    return loaded(theirs, weights)


def loaded(theirs: Any, weights: dict[str, Tensor]) -> Any:
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert unexpected == []
    theirs.tie_weights()
    return theirs.eval()


def their_search(theirs: Any, parameters: BeamParameters) -> list[tuple[tuple[int, ...], float]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = theirs.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            do_sample=False,
            num_beams=parameters.num_beams,
            num_return_sequences=parameters.num_return_sequences,
            length_penalty=parameters.length_penalty,
            early_stopping=parameters.early_stopping,
            max_new_tokens=parameters.max_new_tokens,
            eos_token_id=sorted(parameters.stop_ids) or None,
            pad_token_id=VOCAB_SIZE - 1,
            return_dict_in_generate=True,
            output_scores=True,
        )
    answers = output.sequences[:, len(PROMPT) :].tolist()
    return [
        (until_stop(answer, parameters.stop_ids), score)
        for answer, score in zip(answers, output.sequences_scores.tolist(), strict=True)
    ]


def until_stop(answer: list[int], stop_ids: frozenset[int]) -> tuple[int, ...]:
    """Without the padding behind the first stop token."""
    ends = [n + 1 for n, token in enumerate(answer) if token in stop_ids]
    return tuple(answer[: ends[0]] if ends else answer)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_transformers_finds_the_same_answers_with_the_same_scores(name: str) -> None:
    ours = build(LLAMA if name == "llama" else GPT2)
    theirs = to_llama(ours) if name == "llama" else to_gpt2(ours)
    kinds = itertools.product((1.0, 2.5, -1.0), (False, True, "never"), (2, 4))
    num_stopped = 0
    (likely,) = beam_search(ours, PROMPT, BeamParameters(max_new_tokens=9), cached=True)
    stops = [frozenset[int](), frozenset({likely.token_ids[3]}), frozenset(range(10))]
    for length_penalty, early_stopping, num_beams in kinds:
        for stop_ids in stops:
            parameters = BeamParameters(
                num_beams=num_beams,
                length_penalty=length_penalty,
                early_stopping=early_stopping,  # type: ignore[arg-type]
                num_return_sequences=num_beams,
                max_new_tokens=9,
                stop_ids=stop_ids,
            )
            found = beam_search(ours, PROMPT, parameters, cached=True)
            expected = their_search(theirs, parameters)
            assert [answer.token_ids for answer in found] == [ids for ids, _ in expected], (
                parameters
            )
            scores = [score for _, score in expected]
            assert [answer.score for answer in found] == pytest.approx(scores, abs=1e-4)
            num_stopped += sum(answer.finish_reason == "stop" for answer in found)
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
        model = build(config)
        cached, uncached = (
            beam_search(model, PROMPT, parameters, source_ids=source_ids, cached=cached)
            for cached in (True, False)
        )
        assert [a.token_ids for a in cached] == [a.token_ids for a in uncached]
        assert [a.score for a in cached] == pytest.approx([a.score for a in uncached], abs=1e-4)


def test_one_beam_is_greedy() -> None:
    model, stop_ids = build(LLAMA), frozenset({7})
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
    model = build(dataclasses.replace(config, vocab_size=5))
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
    model = build(LLAMA)
    lengths = []
    for length_penalty in (-3.0, 0.0, 3.0):
        parameters = BeamParameters(
            length_penalty=length_penalty, max_new_tokens=12, stop_ids=frozenset(range(10))
        )
        lengths.append(len(beam_search(model, PROMPT, parameters, cached=True)[0].token_ids))
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_prompt_and_answer_together_fit_into_the_context() -> None:
    model = build(LLAMA)
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
