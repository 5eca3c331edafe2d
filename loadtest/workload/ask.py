"""One request of the crowd, and how its client behaves.

Knows: the wire, what a model can take. Does not know: which request comes when, clocks, Locust.
"""

import random
from dataclasses import dataclass, replace

from quill.protos import generation_pb2 as pb

# Plain words: any tokenizer can read them.
WORDS = (
    *("river", "stone", "window", "garden", "letter", "winter", "bridge", "music", "paper"),
    *("silver", "morning", "market", "island", "captain", "forest", "mirror", "story", "candle"),
    *("doctor", "engine", "summer", "kitchen", "shadow", "valley", "teacher", "ocean", "ladder"),
    *("village", "thunder", "pocket", "basket", "travel", "number", "colour", "question"),
)


@dataclass(frozen=True)
class Facts:
    """What a scenario must know of the model, from GetModel."""

    vocab_size: int
    context: int
    has_tokenizer: bool
    has_template: bool
    max_num_beams: int = 4  # of one request; 1: none
    keeps_forms: bool = False  # as far as GetModel tells: tokens that aren't bytes it doesn't

    @classmethod
    def of(cls, model: pb.Model) -> "Facts":
        template = bool(model.chat_template) and model.has_tokenizer
        facts = cls(model.vocab_size, model.context, model.has_tokenizer, template)
        return replace(facts, max_num_beams=model.max_num_beams, keeps_forms=keeps_forms(model))


def keeps_forms(model: pb.Model) -> bool:
    """Whether there is text, and a token that ends it."""
    writes = model.family != pb.FAMILY_ENCODER
    return writes and model.has_tokenizer and bool(model.eos_token_ids)


@dataclass(frozen=True)
class Ask:
    """A request, and its client: who cancels, dawdles, hurries or reconnects says so here."""

    request: pb.GenerateRequest
    embed: pb.EmbedRequest | None = None  # asked instead
    timeout_s: float = 300.0
    cancel_after: int | None = None  # tokens
    pause_s: float = 0.0  # after each chunk
    reconnect: bool = False  # a channel of its own
    expected: tuple[str, ...] = ("OK",)  # statuses that are no error
    kind: str = ""  # the scenario that it is of, where several are mixed


class RequestDraw:
    """Chance for one request: the same for the same seed and index, on every machine."""

    def __init__(self, seed: int, index: int) -> None:
        self.seed = seed
        self.random = random.Random(f"{seed}/{index}")

    def tokens(self, least: int, most: int, facts: Facts) -> int:
        """A length, such that a quarter of the context is enough for it."""
        top = max(2, min(most, facts.context // 4))
        return self.random.randint(min(least, top), top)


def words(chance: random.Random, number: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(number))


def ids(chance: random.Random, number: int, facts: Facts) -> list[int]:
    return [chance.randrange(facts.vocab_size) for _ in range(number)]


def prompt(chance: random.Random, number: int, facts: Facts) -> pb.GenerateRequest:
    """About so many tokens: as text if the model reads text, else as ids."""
    if facts.has_tokenizer:
        return pb.GenerateRequest(prompt=words(chance, max(1, number * 3 // 4)))
    return pb.GenerateRequest(prompt_ids=pb.TokenIds(ids=ids(chance, number, facts)))


def text(chance: random.Random, number: int, facts: Facts) -> pb.EmbedInput:
    """The same, to be embedded."""
    if facts.has_tokenizer:
        return pb.EmbedInput(text=words(chance, max(1, number * 3 // 4)))
    return pb.EmbedInput(token_ids=pb.TokenIds(ids=ids(chance, number, facts)))


def chat(chance: random.Random, number: int, facts: Facts, system: str = "") -> pb.GenerateRequest:
    """A message, after what the model was told beforehand; a plain prompt if it can't chat."""
    if not facts.has_template:
        return prompt(chance, number, facts)
    said = [pb.Message(role="system", content=system)] if system else []
    question = f"Tell me about the {words(chance, max(1, number // 2))}."
    said.append(pb.Message(role="user", content=question))
    return pb.GenerateRequest(messages=pb.Conversation(messages=said))


def wish(what: str, chance: random.Random, facts: Facts) -> pb.GenerateRequest:
    """Asks for something, in whichever way the model is asked."""
    asked = f"Give me {what}, about the {words(chance, 2)}."
    if facts.has_template:
        said = pb.Conversation(messages=[pb.Message(role="user", content=asked)])
        return pb.GenerateRequest(messages=said)
    return pb.GenerateRequest(prompt=asked) if facts.has_tokenizer else prompt(chance, 8, facts)


def with_sampling(
    draw: RequestDraw, request: pb.GenerateRequest, answer: int
) -> pb.GenerateRequest:
    """Draws as real clients do: some greedy, some warm; most don't name a seed."""
    request.max_new_tokens = answer
    request.temperature = draw.random.choice((0.0, 0.7, 1.0))
    if draw.random.random() < 0.5:
        request.top_p = draw.random.choice((0.9, 0.95))
    if draw.random.random() < 0.3:
        request.repetition_penalty = 1.1
    if draw.random.random() < 0.4:
        request.seed = draw.random.getrandbits(63)
    return request


def with_seed(draw: RequestDraw, request: pb.GenerateRequest) -> pb.GenerateRequest:
    """For clients that leave early: the server names a seed only at an answer's end."""
    request.seed = draw.random.getrandbits(63)
    return request


def shortened(ask: Ask, max_new_tokens: int | None) -> Ask:
    """The same, with at most so many tokens to generate. What must be refused stays as it is."""
    if max_new_tokens is None or ask.embed is not None or "INVALID_ARGUMENT" in ask.expected:
        return ask
    request = pb.GenerateRequest()
    request.CopyFrom(ask.request)
    request.max_new_tokens = min(max_new_tokens, request.max_new_tokens)
    early = ask.cancel_after
    return replace(
        ask, request=request, cancel_after=None if early is None else min(early, max_new_tokens)
    )
