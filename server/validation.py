"""Turns what came over the wire into a Request, or says which field is wrong and why.

Knows: protobuf, every limit of generation.proto. Does not know: gRPC, the engine.
Protobuf objects stop here. Ranges of single numbers are checked by server/request.py.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from protos import generation_pb2 as pb
from server.errors import InvalidFieldError, UnsupportedError
from server.request import MAX_SEED, Request, Sampling
from server.served import SAMPLING_DEFAULTS, Served
from server.text import Text

MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_MESSAGES = 1024
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """What is known of a call beside its message."""

    request_id: str
    deadline_s: float | None  # on the engine's clock


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request, and what is done with its answer on the way to the client."""

    request: Request
    stop: tuple[str, ...] = ()
    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


def read_generate(message: pb.GenerateRequest, served: Served, arrival: Arrival) -> Asked:
    """May take long for long texts: not for the event loop."""
    _check_stops(message.stop)
    check_ids("stop_token_ids", message.stop_token_ids, served)
    check_ids("logit_bias", message.logit_bias, served)
    fields = _fields(message, served)
    sampling = _sampling(message, served)
    logprobs = _optional(message, "logprobs", None)
    prompt_logprobs = _optional(message, "prompt_logprobs", None)
    wanted = [prompt_logprobs, logprobs if message.echo else None]
    request = Request(
        request_id=arrival.request_id,
        prompt_ids=tuple(_read_prompt(message, served)),
        sampling=sampling,
        logprobs=logprobs,
        # An echoed prompt's tokens have their logprobs too.
        prompt_logprobs=max((each for each in wanted if each is not None), default=None),
        deadline_s=arrival.deadline_s,
        **fields,
    )
    return Asked(
        request=request,
        stop=tuple(message.stop),
        echo=message.echo,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def read_score(message: pb.ScoreRequest, served: Served, arrival: Arrival) -> Asked:
    """May take long for long texts: not for the event loop."""
    kind = message.WhichOneof("input")
    if kind is None:
        raise InvalidFieldError("input", "is missing: give text or token_ids")
    if kind == "text":
        ids = _encode(message.text, "text", served)
    else:
        ids = list(message.token_ids.ids)
        check_ids("token_ids", ids, served)
    if not 2 <= len(ids) <= served.context:
        rule = f"it must have from 2 to {served.context}"
        raise InvalidFieldError(kind, f"has {len(ids)} tokens; {rule}")
    request = Request(
        request_id=arrival.request_id,
        prompt_ids=tuple(ids),
        max_new_tokens=0,
        prompt_logprobs=0,
        priority=message.priority,
        deadline_s=arrival.deadline_s,
    )
    return Asked(request=request, prompt_logprobs=0)


def _fields(message: pb.GenerateRequest, served: Served) -> dict[str, Any]:
    eos_ids = frozenset[int]() if message.ignore_eos else frozenset(served.manifest.stop_ids)
    return {
        "seed": message.seed if message.HasField("seed") else secrets.randbelow(MAX_SEED + 1),
        "max_new_tokens": _max_new_tokens(message, served),
        "num_sequences": _num_sequences(message, served),
        "eos_ids": eos_ids,
        "stop_ids": frozenset(message.stop_token_ids),
        "priority": message.priority,
    }


def _sampling(message: pb.GenerateRequest, served: Served) -> Sampling:
    defaults = served.sampling_defaults
    settings: dict[str, Any] = {
        name: getattr(message, name) if message.HasField(name) else defaults[name]
        for name in SAMPLING_DEFAULTS
        if message.HasField(name) or name in defaults
    }
    # More than the vocabulary is the same as off.
    if settings.get("top_k", 0) >= served.vocab_size:
        settings["top_k"] = 0
    return Sampling(
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        logit_bias=dict(message.logit_bias),
        **settings,
    )


def _optional(message: pb.GenerateRequest, name: Any, default: Any) -> Any:
    return getattr(message, name) if message.HasField(name) else default


def _max_new_tokens(message: pb.GenerateRequest, served: Served) -> int:
    wanted: int = _optional(message, "max_new_tokens", served.default_max_new_tokens)
    if not 1 <= wanted <= served.context:
        rule = f"it must be from 1 to {served.context}, the context"
        raise InvalidFieldError("max_new_tokens", f"is {wanted}; {rule}")
    return wanted


def _num_sequences(message: pb.GenerateRequest, served: Served) -> int:
    wanted: int = _optional(message, "num_sequences", 1)
    if not 1 <= wanted <= served.max_num_sequences:
        rule = f"it must be from 1 to {served.max_num_sequences}"
        raise InvalidFieldError("num_sequences", f"is {wanted}; {rule}")
    return wanted


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidFieldError(
            "stop", f"has {len(stops)} entries; at most {MAX_STOPS} are allowed"
        )
    for stop in stops:
        if not 1 <= len(stop.encode()) <= MAX_STOP_BYTES:
            given = f"has an entry of {len(stop.encode())} bytes"
            raise InvalidFieldError("stop", f"{given}; each must have from 1 to {MAX_STOP_BYTES}")


def check_ids(field: str, ids: Any, served: Served) -> None:
    """`ids`: a repeated field, or a map by token."""
    for token in ids:
        if not 0 <= token < served.vocab_size:
            rule = f"this model's are from 0 to {served.vocab_size - 1}"
            raise InvalidFieldError(field, f"has the token id {token}; {rule}")


def _read_prompt(message: pb.GenerateRequest, served: Served) -> list[int]:
    kind = message.WhichOneof("input")
    if kind is None:
        raise InvalidFieldError("input", "is missing: give prompt, prompt_ids or messages")
    if kind == "prompt":
        ids = _encode(message.prompt, "prompt", served)
    elif kind == "messages":
        ids = _read_messages(message.messages.messages, served)
    else:
        ids = list(message.prompt_ids.ids)
        check_ids("prompt_ids", ids, served)
    if not ids:
        raise InvalidFieldError(kind, "is empty; it must have at least one token")
    if len(ids) >= served.context:
        rule = f"at most {served.context - 1} fit, so that one can be generated"
        raise InvalidFieldError(kind, f"has {len(ids)} tokens; {rule}")
    return ids


def _read_messages(messages: Sequence[pb.Message], served: Served) -> list[int]:
    if served.template is None:
        raise UnsupportedError(
            "this model has no chat template, so it can't take messages. Give a prompt instead"
        )
    text = _text(served, "messages")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        rule = f"it must have from 1 to {MAX_MESSAGES}"
        raise InvalidFieldError("messages", f"has {len(messages)} messages; {rule}")
    for message in messages:
        if message.role not in ROLES:
            given = f"has a message of the role {message.role[:40]!r}"
            raise InvalidFieldError("messages", f"{given}; known are {', '.join(ROLES)}")
    spoken = [{"role": each.role, "content": text.mark(each.content)} for each in messages]
    return text.encode_rendered(served.template.render(spoken))


def _text(served: Served, field: str) -> Text:
    if served.text is None:
        raise UnsupportedError(
            f"this model has no tokenizer, so it can't take {field}. Give token ids instead"
        )
    return served.text


def _encode(text: str, field: str, served: Served) -> list[int]:
    tokenizer = _text(served, field)
    most = served.context * tokenizer.max_characters_per_token
    if len(text) > most:  # refused before time is spent on it
        rule = f"{served.context} tokens have at most {most}"
        raise InvalidFieldError(field, f"has {len(text)} characters; {rule}")
    return tokenizer.encode(text)
