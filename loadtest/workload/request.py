"""One request of a load, how its client behaves, and the parts that scenarios build it from.

Knows: generation.proto, what a model accepts. Does not know: when a request is sent, Locust.
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
class ModelInfo:
    """What a scenario needs to know about the model, from GetModel."""

    vocab_size: int
    context: int
    has_tokenizer: bool
    has_template: bool
    max_num_beams: int = 4  # of one request; 1: none
    takes_constraints: bool = False  # as far as GetModel tells

    @classmethod
    def of(cls, model: pb.Model) -> "ModelInfo":
        template = bool(model.chat_template) and model.has_tokenizer
        info = cls(model.vocab_size, model.context, model.has_tokenizer, template)
        constrained = takes_constraints(model)
        return replace(info, max_num_beams=model.max_num_beams, takes_constraints=constrained)


def takes_constraints(model: pb.Model) -> bool:
    """Structured output needs text and a token that ends it."""
    generates = model.family != pb.FAMILY_ENCODER
    return generates and model.has_tokenizer and bool(model.eos_token_ids)


@dataclass(frozen=True)
class LoadRequest:
    """A request, and whether its client cancels, reads slowly, has a deadline or reconnects."""

    request: pb.GenerateRequest
    embed: pb.EmbedRequest | None = None  # sent instead
    timeout_s: float = 300.0
    cancel_after: int | None = None  # tokens
    pause_s: float = 0.0  # after each chunk
    reconnect: bool = False  # a channel of its own
    expected: tuple[str, ...] = ("OK",)  # statuses that aren't errors
    kind: str = ""  # its scenario, where several are mixed


class RequestDraw:
    """Randomness for one request: the same for the same seed and index, on every machine."""

    def __init__(self, seed: int, index: int) -> None:
        self.seed = seed
        self.random = random.Random(f"{seed}/{index}")

    def tokens(self, least: int, most: int, info: ModelInfo) -> int:
        """A length of at most a quarter of the context."""
        top = max(2, min(most, info.context // 4))
        return self.random.randint(min(least, top), top)


def words(chance: random.Random, number: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(number))


def ids(chance: random.Random, number: int, info: ModelInfo) -> list[int]:
    return [chance.randrange(info.vocab_size) for _ in range(number)]


def prompt(chance: random.Random, number: int, info: ModelInfo) -> pb.GenerateRequest:
    """About so many tokens: as text if the model has a tokenizer, else as ids."""
    if info.has_tokenizer:
        return pb.GenerateRequest(prompt=words(chance, max(1, number * 3 // 4)))
    return pb.GenerateRequest(prompt_ids=pb.TokenIds(ids=ids(chance, number, info)))


def embed_input(chance: random.Random, number: int, info: ModelInfo) -> pb.EmbedInput:
    """The same, to be embedded."""
    if info.has_tokenizer:
        return pb.EmbedInput(text=words(chance, max(1, number * 3 // 4)))
    return pb.EmbedInput(token_ids=pb.TokenIds(ids=ids(chance, number, info)))


def chat(
    chance: random.Random, number: int, info: ModelInfo, system: str = ""
) -> pb.GenerateRequest:
    """A user's message after a system prompt; a plain prompt if there is no chat template."""
    if not info.has_template:
        return prompt(chance, number, info)
    messages = [pb.Message(role="system", content=system)] if system else []
    question = f"Tell me about the {words(chance, max(1, number // 2))}."
    messages.append(pb.Message(role="user", content=question))
    return pb.GenerateRequest(messages=pb.Conversation(messages=messages))


def request_for(what: str, chance: random.Random, info: ModelInfo) -> pb.GenerateRequest:
    """Asks for something, as a chat message or a prompt, whichever the model accepts."""
    text = f"Give me {what}, about the {words(chance, 2)}."
    if info.has_template:
        messages = [pb.Message(role="user", content=text)]
        return pb.GenerateRequest(messages=pb.Conversation(messages=messages))
    return pb.GenerateRequest(prompt=text) if info.has_tokenizer else prompt(chance, 8, info)


def with_sampling(
    draw: RequestDraw, request: pb.GenerateRequest, answer: int
) -> pb.GenerateRequest:
    """Samples as real clients do: some greedy, some not; most without a seed."""
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
    """For clients that cancel: the server reports a seed only at an answer's end."""
    request.seed = draw.random.getrandbits(63)
    return request


def shortened(load: LoadRequest, max_new_tokens: int | None) -> LoadRequest:
    """The same with at most so many tokens to generate. Invalid requests stay as they are."""
    if max_new_tokens is None or load.embed is not None or "INVALID_ARGUMENT" in load.expected:
        return load
    request = pb.GenerateRequest()
    request.CopyFrom(load.request)
    request.max_new_tokens = min(max_new_tokens, request.max_new_tokens)
    early = load.cancel_after
    return replace(
        load, request=request, cancel_after=None if early is None else min(early, max_new_tokens)
    )
