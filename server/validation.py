"""Turns what came over the wire into a Request, or says which field is wrong and why.

Knows: protobuf, every limit of generation.proto. Does not know: gRPC, the engine.
Protobuf objects stop here. Ranges of single numbers are checked by server/request.py.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from protos import generation_pb2 as pb
from server.errors import InvalidFieldError, UnimplementedError
from server.prompts import check_ids, encode, read_ids
from server.request import MAX_SEED, Request
from server.sampling_fields import read_beams, read_sampling
from server.served import Served

MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_STOP_IDS = 64


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """What is known of a call beside its message."""

    request_id: str
    deadline_s: float | None  # on the engine's clock
    owner: str = ""
    cache_scope: str = ""


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
    if len(message.stop_token_ids) > MAX_STOP_IDS:
        given = f"has {len(message.stop_token_ids)} entries"
        raise InvalidFieldError("stop_token_ids", f"{given}; at most {MAX_STOP_IDS} are allowed")
    _check_family(message, served)
    check_ids("stop_token_ids", message.stop_token_ids, served)
    check_ids("logit_bias", message.logit_bias, served)
    fields = _fields(message, served)
    logprobs = _optional(message, "logprobs", None)
    prompt_logprobs = _optional(message, "prompt_logprobs", None)
    wanted = [prompt_logprobs, logprobs if message.echo else None]
    request = Request(
        request_id=arrival.request_id,
        **read_ids(message, served),
        logprobs=logprobs,
        # An echoed prompt's tokens have their logprobs too.
        prompt_logprobs=max((each for each in wanted if each is not None), default=None),
        deadline_s=arrival.deadline_s,
        owner=arrival.owner,
        cache_scope=arrival.cache_scope,
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
    if served.is_translator:
        raise UnimplementedError("a translation model can't score a text by itself")
    kind = message.WhichOneof("input")
    if kind is None:
        raise InvalidFieldError("input", "is missing: give text or token_ids")
    if kind == "text":
        ids = encode(message.text, "text", served)
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
        owner=arrival.owner,
        cache_scope=arrival.cache_scope,
    )
    return Asked(request=request, prompt_logprobs=0)


def _check_family(message: pb.GenerateRequest, served: Served) -> None:
    if not served.is_translator:
        return
    if message.HasField("prompt_logprobs"):
        raise InvalidFieldError("prompt_logprobs", "is set; a translation model doesn't rate those")
    if message.echo:
        raise InvalidFieldError("echo", "is set; a translation doesn't continue its prompt")


def _fields(message: pb.GenerateRequest, served: Served) -> dict[str, Any]:
    eos_ids = frozenset[int]() if message.ignore_eos else frozenset(served.manifest.stop_ids)
    return {
        "seed": message.seed if message.HasField("seed") else secrets.randbelow(MAX_SEED + 1),
        "max_new_tokens": _max_new_tokens(message, served),
        "num_sequences": _num_sequences(message, served),
        "sampling": read_sampling(message, served),
        "beams": read_beams(message, served),
        "eos_ids": eos_ids,
        "stop_ids": frozenset(message.stop_token_ids),
        "priority": message.priority,
    }


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
