"""What both clients share: making requests, reading errors, deciding when to try again.

Knows: generation.proto, gRPC's errors and their rich details. Does not know: channels, waiting.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar

import grpc

from quill.protos import generation_pb2 as pb
from quill.server.client.call_error import CallError

# A text, token ids, or a conversation of {"role": …, "content": …}; or a message that has all.
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | pb.GenerateRequest
# What to embed: one text, or several, each as text or token ids, or with a range of these; or a
# message that has all.
Texts = str | Sequence[str | Sequence[int] | pb.EmbedInput] | pb.EmbedRequest

_Request = TypeVar("_Request", pb.GenerateRequest, pb.EmbedRequest)


class Options(TypedDict, total=False):
    """As in GenerateRequest, which says what each means and what it is when it isn't given."""

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    num_sequences: int
    logprobs: int
    prompt_logprobs: int
    echo: bool
    priority: int
    num_beams: int
    length_penalty: float
    early_stopping: pb.EarlyStopping
    constraint: pb.Constraint


def make_request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    if isinstance(prompt, pb.GenerateRequest):
        return _merged(prompt, pb.GenerateRequest, options)
    try:
        return pb.GenerateRequest(**_input(prompt), **options)
    except (ValueError, TypeError, OverflowError) as error:
        raise _unwritable(error) from error


def score_request(text: str | Sequence[int]) -> pb.ScoreRequest:
    return pb.ScoreRequest(**_text(text))


class EmbedOptions(TypedDict, total=False):
    """As in EmbedRequest, but for the pooling's name: "mean", "first" or "last"."""

    pooling: str
    normalise: bool
    dimensions: int
    priority: int


def embed_request(inputs: Texts, options: EmbedOptions) -> pb.EmbedRequest:
    fields: dict[str, Any] = dict(options)
    if "pooling" in options:
        fields["pooling"] = f"POOLING_{options['pooling'].upper()}"
    if isinstance(inputs, pb.EmbedRequest):
        return _merged(inputs, pb.EmbedRequest, fields)
    texts = [inputs] if isinstance(inputs, str) else inputs
    try:
        return pb.EmbedRequest(inputs=map(_embed_input, texts), **fields)
    except (ValueError, TypeError, OverflowError) as error:
        raise _unwritable(error) from error


def fill_request(text: str | Sequence[int], top_k: int | None) -> pb.FillMaskRequest:
    try:
        return pb.FillMaskRequest(**_text(text), top_k=top_k)
    except (ValueError, TypeError, OverflowError) as error:
        raise _unwritable(error) from error


def _embed_input(text: str | Sequence[int] | pb.EmbedInput) -> pb.EmbedInput:
    return text if isinstance(text, pb.EmbedInput) else pb.EmbedInput(**_text(text))


def _text(text: str | Sequence[int]) -> dict[str, Any]:
    return {"text": text} if isinstance(text, str) else {"token_ids": pb.TokenIds(ids=text)}


def _merged(message: _Request, kind: type[_Request], options: Mapping[str, Any]) -> _Request:
    """A message with options beside it, which go before its own."""
    try:
        changes = kind(**options)
    except (ValueError, TypeError, OverflowError) as error:
        raise _unwritable(error) from error
    merged = kind()
    merged.CopyFrom(message)
    for field, _ in changes.ListFields():
        merged.ClearField(field.name)
    merged.MergeFrom(changes)
    return merged


def _unwritable(error: Exception) -> CallError:
    reason = f"the request can't be written: {error}"
    return CallError(grpc.StatusCode.INVALID_ARGUMENT, reason)


def seeded(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """With a seed of its own, if it has none: so that it can be asked again."""
    if not request.HasField("seed"):
        request.seed = secrets.randbits(63)
    return request


def _input(prompt: str | Sequence[int] | Sequence[Mapping[str, str]]) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    ids = [each for each in prompt if isinstance(each, int)]
    if len(ids) == len(prompt):
        return {"prompt_ids": pb.TokenIds(ids=ids)}
    messages = [pb.Message(**each) for each in prompt if isinstance(each, Mapping)]
    return {"messages": pb.Conversation(messages=messages)}
