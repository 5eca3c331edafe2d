"""The scenarios: each makes request number `index` from a seed, and nothing else.

Knows: lengths, clients' behaviour. Does not know: when a request is sent, what is answered.
The same seed and index give the same request, so a run can be repeated and verified.
"""

import random
from collections.abc import Callable
from dataclasses import replace

from quill.loadtest.errors import OptionError
from quill.loadtest.workload.constraints import sample_constraint
from quill.loadtest.workload.request import (
    LoadRequest,
    ModelInfo,
    RequestDraw,
    chat,
    embed_input,
    ids,
    prompt,
    request_for,
    shortened,
    takes_constraints,
    with_sampling,
    with_seed,
    words,
)
from quill.protos import generation_pb2 as pb

Scenario = Callable[[RequestDraw, ModelInfo], LoadRequest]
NUM_SYSTEM_PROMPTS = 20


def short_chat(draw: RequestDraw, info: ModelInfo) -> LoadRequest:
    """A question and a short answer."""
    question = chat(draw.random, draw.tokens(4, 24, info), info)
    return LoadRequest(with_sampling(draw, question, draw.tokens(8, 48, info)))


def long_prompt(draw: RequestDraw, info: ModelInfo) -> LoadRequest:
    """A long prompt and a short answer."""
    most = min(info.context // 3, 1024)  # small vocabularies need three tokens a word
    number = draw.random.randint(most // 2, most)
    return LoadRequest(
        with_sampling(draw, prompt(draw.random, number, info), draw.tokens(4, 16, info))
    )


def long_answer(draw: RequestDraw, info: ModelInfo) -> LoadRequest:
    """A short prompt and a long answer: EOS is ignored."""
    request = with_sampling(
        draw, chat(draw.random, draw.tokens(4, 24, info), info), draw.tokens(128, 256, info)
    )
    request.ignore_eos = True
    return LoadRequest(request)


def shared_prompt(draw: RequestDraw, info: ModelInfo) -> LoadRequest:
    """All prompts share a prefix: what prefix caching is for."""
    return _with_prefix(random.Random(f"{draw.seed}/shared"), 256, draw, info)


def system_prompts(draw: RequestDraw, info: ModelInfo) -> LoadRequest:
    """Twenty applications, each with a long system prompt of its own, all equally frequent."""
    number = draw.random.randrange(NUM_SYSTEM_PROMPTS)
    return _with_prefix(random.Random(f"{draw.seed}/system/{number}"), 512, draw, info)


def _with_prefix(
    shared: random.Random, most: int, draw: RequestDraw, info: ModelInfo
) -> LoadRequest:
    length, own = min(info.context // 3, most), draw.tokens(4, 16, info)
    if info.has_template:
        request = chat(draw.random, own, info, system=words(shared, length * 3 // 4))
    elif info.has_tokenizer:
        text = f"{words(shared, length * 3 // 4)} {words(draw.random, own)}"
        request = pb.GenerateRequest(prompt=text)
    else:
        tokens = ids(shared, length, info) + ids(draw.random, own, info)
        request = pb.GenerateRequest(prompt_ids=pb.TokenIds(ids=tokens))
    return LoadRequest(with_sampling(draw, request, draw.tokens(8, 32, info)))


def structured(draw: RequestDraw, info: ModelInfo) -> LoadRequest:
    """Structured output: schemas, regular expressions, choices, any JSON, grammars."""
    wanted = sample_constraint(draw.random)
    request = request_for(wanted.what, draw.random, info)
    request.constraint.CopyFrom(wanted.constraint)
    return LoadRequest(with_sampling(draw, request, draw.tokens(16, 96, info)))


def mixed(draw: RequestDraw, info: ModelInfo) -> LoadRequest:
    """Mostly short chats, and some of all other well-behaved scenarios that the model supports."""
    kinds: tuple[Scenario, ...] = (
        *(short_chat, short_chat, short_chat, long_prompt, long_answer, shared_prompt),
        *((structured,) if info.takes_constraints else ()),
        *((beams,) if info.max_num_beams > 1 else ()),
    )
    return _one_of(kinds, draw, info)


def cancels(draw: RequestDraw, info: ModelInfo) -> LoadRequest:
    """Cancels in the middle of an answer."""
    request = with_seed(draw, long_answer(draw, info).request)
    after = draw.random.randint(1, max(1, int(request.max_new_tokens) // 2))
    return LoadRequest(request, cancel_after=after, expected=("CANCELLED",))


def slow_readers(draw: RequestDraw, info: ModelInfo) -> LoadRequest:
    """Pauses after each chunk. Other clients must not wait for it."""
    request = short_chat(draw, info).request
    return LoadRequest(request, pause_s=draw.random.uniform(0.02, 0.2))


def deadlines(draw: RequestDraw, info: ModelInfo) -> LoadRequest:
    """Short deadlines: many requests are rejected, or end in the middle."""
    request = with_seed(draw, long_answer(draw, info).request)
    expected = ("OK", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
    return LoadRequest(request, timeout_s=draw.random.uniform(0.05, 1.5), expected=expected)


def bad_requests(draw: RequestDraw, info: ModelInfo) -> LoadRequest:
    """Invalid: the server must reject the request, and nothing else may happen."""
    request = with_sampling(draw, chat(draw.random, 8, info), 8)
    mistakes: tuple[Callable[[], object], ...] = (
        lambda: setattr(request, "temperature", float("nan")),
        lambda: setattr(request, "top_p", 1.5),
        lambda: setattr(request, "max_new_tokens", info.context + 1),
        lambda: request.ClearField("input"),
        lambda: request.prompt_ids.ids.append(info.vocab_size),
        lambda: setattr(request, "repetition_penalty", -1.0),
        lambda: request.stop.append(""),
        lambda: setattr(request, "num_sequences", 0),
    )
    draw.random.choice(mistakes)()
    return LoadRequest(request, expected=("INVALID_ARGUMENT",))


def reconnects(draw: RequestDraw, info: ModelInfo) -> LoadRequest:
    """A connection of its own for each request."""
    return LoadRequest(short_chat(draw, info).request, reconnect=True)


def unfriendly(draw: RequestDraw, info: ModelInfo) -> LoadRequest:
    """All badly behaved scenarios, among short chats."""
    kinds = (short_chat, cancels, slow_readers, deadlines, bad_requests, reconnects)
    return _one_of(kinds, draw, info)


def beams(draw: RequestDraw, info: ModelInfo) -> LoadRequest:
    """Beam search: one answer or several, which come whole at the end."""
    request = chat(draw.random, draw.tokens(4, 24, info), info)
    request.max_new_tokens = draw.tokens(8, 32, info)
    request.num_beams = min(draw.random.randint(2, 4), info.max_num_beams)
    request.num_sequences = draw.random.randint(1, request.num_beams)
    return LoadRequest(request)


def embed(draw: RequestDraw, info: ModelInfo) -> LoadRequest:
    """Texts to embed, one or several, most of them short and some long."""
    number = draw.random.choice((1, 1, 4, 16))
    longest = [draw.random.choice((8, 24, 256)) for _ in range(number)]
    request = pb.EmbedRequest(
        inputs=[embed_input(draw.random, draw.tokens(1, most, info), info) for most in longest]
    )
    if draw.random.random() < 0.5:
        request.pooling = draw.random.choice((pb.POOLING_MEAN, pb.POOLING_FIRST, pb.POOLING_LAST))
    if draw.random.random() < 0.5:
        request.normalize = draw.random.random() < 0.5
    return LoadRequest(pb.GenerateRequest(), embed=request)


def _one_of(kinds: tuple[Scenario, ...], draw: RequestDraw, info: ModelInfo) -> LoadRequest:
    kind = draw.random.choice(kinds)
    return replace(kind(draw, info), kind=name_of(kind))


def name_of(scenario: Scenario) -> str:
    return scenario.__name__.replace("_", "-")


SCENARIOS: dict[str, Scenario] = {
    name_of(function): function
    for function in (
        *(short_chat, long_prompt, long_answer, shared_prompt, system_prompts, structured, mixed),
        *(cancels, slow_readers, deadlines, bad_requests, reconnects, unfriendly, beams, embed),
    )
}


def find_scenario(name: str) -> Scenario:
    if name not in SCENARIOS:
        raise OptionError(f"there is no scenario {name!r}; there are {', '.join(SCENARIOS)}")
    return SCENARIOS[name]


def check_model(name: str, model: pb.Model) -> None:
    """Raises where the model doesn't support the scenario."""
    if name == "embed" and not model.embedding_size:
        raise OptionError(f"{model.name} doesn't embed texts. Choose another --scenario")
    if name == "structured" and model.family != pb.FAMILY_ENCODER and not takes_constraints(model):
        reason = "it has no tokenizer, or no token that ends a text"
        raise OptionError(
            f"{model.name} has no structured output: {reason}. Choose another --scenario"
        )
    if name != "embed" and model.family == pb.FAMILY_ENCODER:
        raise OptionError(f"{model.name} is an encoder, which generates nothing: --scenario embed")


def make_request(
    name: str, seed: int, index: int, info: ModelInfo, max_new_tokens: int | None = None
) -> LoadRequest:
    """Request number `index` of a scenario."""
    load = find_scenario(name)(RequestDraw(seed, index), info)
    return replace(shortened(load, max_new_tokens), kind=load.kind or name)
