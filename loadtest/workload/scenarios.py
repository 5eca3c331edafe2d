"""What the crowd asks: each scenario makes request number `index` from a seed, and nothing else.

Knows: lengths, manners. Does not know: when a request is sent, or what comes of it.
The same seed and index give the same request, so a run can be repeated and checked.
"""

import random
from collections.abc import Callable
from dataclasses import replace

from quill.loadtest.errors import OptionError
from quill.loadtest.workload.ask import (
    Ask,
    Facts,
    RequestDraw,
    chat,
    ids,
    keeps_forms,
    prompt,
    shortened,
    text,
    wish,
    with_sampling,
    with_seed,
    words,
)
from quill.loadtest.workload.forms import draw_form
from quill.protos import generation_pb2 as pb

Scenario = Callable[[RequestDraw, Facts], Ask]
NUM_SYSTEM_PROMPTS = 20


def short_chat(draw: RequestDraw, facts: Facts) -> Ask:
    """A question and a short answer."""
    question = chat(draw.random, draw.tokens(4, 24, facts), facts)
    return Ask(with_sampling(draw, question, draw.tokens(8, 48, facts)))


def long_prompt(draw: RequestDraw, facts: Facts) -> Ask:
    """Much to read, little to say."""
    most = min(facts.context // 3, 1024)  # small vocabularies take three tokens a word
    number = draw.random.randint(most // 2, most)
    return Ask(with_sampling(draw, prompt(draw.random, number, facts), draw.tokens(4, 16, facts)))


def long_answer(draw: RequestDraw, facts: Facts) -> Ask:
    """Little to read, much to say: ends of text are passed over."""
    request = with_sampling(
        draw, chat(draw.random, draw.tokens(4, 24, facts), facts), draw.tokens(128, 256, facts)
    )
    request.ignore_eos = True
    return Ask(request)


def shared_prompt(draw: RequestDraw, facts: Facts) -> Ask:
    """Everybody's prompt begins alike: what a prefix cache is for."""
    return _beginning_with(random.Random(f"{draw.seed}/shared"), 256, draw, facts)


def system_prompts(draw: RequestDraw, facts: Facts) -> Ask:
    """Twenty applications, each with a long system prompt of its own, all asked equally often."""
    number = draw.random.randrange(NUM_SYSTEM_PROMPTS)
    return _beginning_with(random.Random(f"{draw.seed}/system/{number}"), 512, draw, facts)


def _beginning_with(shared: random.Random, most: int, draw: RequestDraw, facts: Facts) -> Ask:
    length, own = min(facts.context // 3, most), draw.tokens(4, 16, facts)
    if facts.has_template:
        request = chat(draw.random, own, facts, system=words(shared, length * 3 // 4))
    elif facts.has_tokenizer:
        text = f"{words(shared, length * 3 // 4)} {words(draw.random, own)}"
        request = pb.GenerateRequest(prompt=text)
    else:
        tokens = ids(shared, length, facts) + ids(draw.random, own, facts)
        request = pb.GenerateRequest(prompt_ids=pb.TokenIds(ids=tokens))
    return Ask(with_sampling(draw, request, draw.tokens(8, 32, facts)))


def structured(draw: RequestDraw, facts: Facts) -> Ask:
    """Answers that keep to a form: schemas, expressions, choices, any JSON, grammars."""
    form = draw_form(draw.random)
    request = wish(form.what, draw.random, facts)
    request.constraint.CopyFrom(form.constraint)
    return Ask(with_sampling(draw, request, draw.tokens(16, 96, facts)))


def mixed(draw: RequestDraw, facts: Facts) -> Ask:
    """Mostly short chats, and some of everything that is friendly and that the model can do."""
    kinds: tuple[Scenario, ...] = (
        *(short_chat, short_chat, short_chat, long_prompt, long_answer, shared_prompt),
        *((structured,) if facts.keeps_forms else ()),
        *((beams,) if facts.max_num_beams > 1 else ()),
    )
    return _one_of(kinds, draw, facts)


def cancels(draw: RequestDraw, facts: Facts) -> Ask:
    """Leaves in the middle of its answer."""
    request = with_seed(draw, long_answer(draw, facts).request)
    after = draw.random.randint(1, max(1, int(request.max_new_tokens) // 2))
    return Ask(request, cancel_after=after, expected=("CANCELLED",))


def slow_readers(draw: RequestDraw, facts: Facts) -> Ask:
    """Takes a nap after each chunk. Others must not wait for it."""
    request = short_chat(draw, facts).request
    return Ask(request, pause_s=draw.random.uniform(0.02, 0.2))


def deadlines(draw: RequestDraw, facts: Facts) -> Ask:
    """In a hurry: many will be refused, or cut off in the middle."""
    request = with_seed(draw, long_answer(draw, facts).request)
    expected = ("OK", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
    return Ask(request, timeout_s=draw.random.uniform(0.05, 1.5), expected=expected)


def bad_requests(draw: RequestDraw, facts: Facts) -> Ask:
    """Breaks a rule. The server must say so, and nothing else may happen."""
    request = with_sampling(draw, chat(draw.random, 8, facts), 8)
    breaks: tuple[Callable[[], object], ...] = (
        lambda: setattr(request, "temperature", float("nan")),
        lambda: setattr(request, "top_p", 1.5),
        lambda: setattr(request, "max_new_tokens", facts.context + 1),
        lambda: request.ClearField("input"),
        lambda: request.prompt_ids.ids.append(facts.vocab_size),
        lambda: setattr(request, "repetition_penalty", -1.0),
        lambda: request.stop.append(""),
        lambda: setattr(request, "num_sequences", 0),
    )
    draw.random.choice(breaks)()
    return Ask(request, expected=("INVALID_ARGUMENT",))


def reconnects(draw: RequestDraw, facts: Facts) -> Ask:
    """A connection of its own for each request."""
    return Ask(short_chat(draw, facts).request, reconnect=True)


def unfriendly(draw: RequestDraw, facts: Facts) -> Ask:
    """Everything that is unfriendly, among short chats."""
    kinds = (short_chat, cancels, slow_readers, deadlines, bad_requests, reconnects)
    return _one_of(kinds, draw, facts)


def beams(draw: RequestDraw, facts: Facts) -> Ask:
    """Searches instead of drawing: one answer or several, which come whole and at the end."""
    request = chat(draw.random, draw.tokens(4, 24, facts), facts)
    request.max_new_tokens = draw.tokens(8, 32, facts)
    request.num_beams = min(draw.random.randint(2, 4), facts.max_num_beams)
    request.num_sequences = draw.random.randint(1, request.num_beams)
    return Ask(request)


def embed(draw: RequestDraw, facts: Facts) -> Ask:
    """Texts to be turned into vectors, one or several, most of them short and some long."""
    number = draw.random.choice((1, 1, 4, 16))
    longest = [draw.random.choice((8, 24, 256)) for _ in range(number)]
    request = pb.EmbedRequest(
        inputs=[text(draw.random, draw.tokens(1, most, facts), facts) for most in longest]
    )
    if draw.random.random() < 0.5:
        request.pooling = draw.random.choice((pb.POOLING_MEAN, pb.POOLING_FIRST, pb.POOLING_LAST))
    if draw.random.random() < 0.5:
        request.normalize = draw.random.random() < 0.5
    return Ask(pb.GenerateRequest(), embed=request)


def _one_of(kinds: tuple[Scenario, ...], draw: RequestDraw, facts: Facts) -> Ask:
    kind = draw.random.choice(kinds)
    return replace(kind(draw, facts), kind=name_of(kind))


def name_of(scenario: Scenario) -> str:
    return scenario.__name__.replace("_", "-")


SCENARIOS: dict[str, Scenario] = {
    name_of(function): function
    for function in (
        *(short_chat, long_prompt, long_answer, shared_prompt, system_prompts, structured, mixed),
        *(cancels, slow_readers, deadlines, bad_requests, reconnects, unfriendly, beams, embed),
    )
}


def check_scenario(name: str, model: pb.Model | None = None) -> None:
    """Whether there is one, and whether the model, if it is known by now, can do it."""
    if name not in SCENARIOS:
        raise OptionError(f"there is no scenario {name!r}; there are {', '.join(SCENARIOS)}")
    if model is None:
        return
    if name == "embed" and not model.embedding_size:
        raise OptionError(f"{model.name} doesn't embed texts. Choose another --scenario")
    if name == "structured" and model.family != pb.FAMILY_ENCODER and not keeps_forms(model):
        reason = "it has no tokenizer, or no token that ends a text"
        raise OptionError(f"{model.name} can't keep to a form: {reason}. Choose another --scenario")
    if name != "embed" and model.family == pb.FAMILY_ENCODER:
        raise OptionError(f"{model.name} is an encoder, which writes nothing: --scenario embed")


def make_ask(
    name: str, seed: int, index: int, facts: Facts, max_new_tokens: int | None = None
) -> Ask:
    """Request number `index` of a scenario."""
    ask = shortened(SCENARIOS[name](RequestDraw(seed, index), facts), max_new_tokens)
    return replace(ask, kind=ask.kind or name)
