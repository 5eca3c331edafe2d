"""Requests from a caller's arguments.

Knows: generation.proto, OpenTelemetry if the program uses it. Does not know: channels, calls.
"""

import json
import secrets
import sys
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeVar

import grpc

from quill.protos import generation_pb2 as pb
from quill.server.client.access import Metadata
from quill.server.client.errors import CallError
from quill.server.client.options import EmbedOptions, GenerateOptions
from quill.server.fields import EARLY_STOPPING, POOLING, TOOL_MODE, Choices

# A text, token ids, or a conversation of {"role": …, "content": …}, with the fields of Message.
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any] | pb.Message]
# What to embed: one text, or several, each as text or token ids, or with a range of these.
Texts = str | Sequence[str | Sequence[int] | pb.EmbedInput]
_Response = TypeVar("_Response")


class Options(GenerateOptions, total=False):
    """As in GenerateRequest, which says what each means and what its default is.

    Tools may be dicts {"name": …, "description": …, "parameters": …}, the last one a dict, too; the
    tool choice may be "auto", "none", "required" or a tool's name.
    """

    constraint: pb.Constraint
    tools: Sequence[pb.Tool | Mapping[str, Any]]
    tool_choice: pb.ToolChoice | str
    parallel_tool_calls: bool


def make_request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    fields: dict[str, Any] = dict(options)
    try:
        if "tools" in options:
            fields["tools"] = list(map(_tool, options["tools"]))
        if "tool_choice" in options:
            fields["tool_choice"] = _tool_choice(options["tool_choice"])
        if "early_stopping" in options:
            fields["early_stopping"] = _choice(options["early_stopping"], EARLY_STOPPING)
        return pb.GenerateRequest(**_input(prompt), **fields)
    except (ValueError, TypeError, OverflowError) as error:
        raise _unwritable(error) from error


def _tool(tool: pb.Tool | Mapping[str, Any]) -> pb.Tool:
    if isinstance(tool, pb.Tool):
        return tool
    if not isinstance(tool, Mapping):
        raise TypeError(_stranger(tool, "tools, which have name, description and parameters"))
    parameters = tool.get("parameters", "")
    text = parameters if isinstance(parameters, str) else json.dumps(parameters)
    return pb.Tool(**{**tool, "parameters": text})


def _tool_choice(choice: pb.ToolChoice | str) -> pb.ToolChoice:
    if isinstance(choice, pb.ToolChoice):
        return choice
    if choice in TOOL_MODE.values:
        return pb.ToolChoice(mode=TOOL_MODE.proto_name(choice))
    return pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED, names=[choice])


def _choice(value: str | int, choices: Choices) -> str | int:
    """An enum's value by its name, or as it is."""
    if not isinstance(value, str):
        return value
    name = value.lower()
    if name not in choices.values:
        raise ValueError(f"{value!r} isn't known; it must be {' or '.join(choices.values)}")
    return choices.proto_name(name)


def score_request(text: str | Sequence[int]) -> pb.ScoreRequest:
    try:
        return pb.ScoreRequest(**_text(text))
    except (ValueError, TypeError, OverflowError) as error:
        raise _unwritable(error) from error


def embed_request(inputs: Texts, options: EmbedOptions) -> pb.EmbedRequest:
    texts = [inputs] if isinstance(inputs, str) else inputs
    fields: dict[str, Any] = dict(options)
    try:
        if "pooling" in options:
            fields["pooling"] = _choice(options["pooling"], POOLING)
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


def _unwritable(error: Exception) -> CallError:
    reason = f"the request can't be written: {error}"
    return CallError(grpc.StatusCode.INVALID_ARGUMENT, reason)


def with_seed(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """Sets a random seed if the request has none, so that it can be repeated."""
    if not request.HasField("seed"):
        request.seed = secrets.randbits(63)
    return request


def trace_metadata() -> Metadata:
    """The current OpenTelemetry span as W3C trace context, which the server's spans join. Nothing
    is imported in a program without OpenTelemetry."""
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return tuple(headers.items())


def only(responses: Sequence[_Response]) -> _Response:
    """Of a call that has one response."""
    if len(responses) != 1:
        reason = f"the call succeeded with {len(responses)} responses in place of one"
        raise CallError(grpc.StatusCode.INTERNAL, reason)
    return responses[0]


def _input(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, bytes | Mapping):  # which could be gone through, too
        rule = "it must be a text, token ids, or messages with role and content"
        raise TypeError(f"the prompt is a {type(prompt).__name__}; {rule}")
    given: list[Any] = list(prompt)
    if all(isinstance(each, Integral) for each in given):
        return {"prompt_ids": pb.TokenIds(ids=map(int, given))}
    return {"messages": pb.Conversation(messages=map(_message, given))}


def _message(message: Any) -> pb.Message:
    if isinstance(message, pb.Message):
        return message
    if not isinstance(message, Mapping):
        raise TypeError(_stranger(message, "messages, which have role and content"))
    return pb.Message(**message)


def _stranger(given: object, among: str) -> str:
    return f"a {type(given).__name__} is among the {among}"
