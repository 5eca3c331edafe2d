"""What came as tensors, as generation.proto has it.

Knows: the tensors of the model's card, vLLM's names of options. Does not know: gRPC, limits:
every field is checked where generation.proto's are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quill.protos import generation_pb2 as pb
from quill.protos import kserve_pb2 as kserve
from quill.server.errors import InvalidFieldError
from quill.server.kserve.model_card import INPUTS, ON_DEMAND, OUTPUTS, TEXT
from quill.server.kserve.tensors import (
    MAX_NAME,
    SHARED_MEMORY,
    Values,
    read_parameter,
    read_tensors,
)
from quill.server.service.generation_options import OPTIONS, REFUSED, as_written, fill
from quill.server.service.json_fields import (
    INTEGER,
    STRING,
    Field,
    Json,
    Refused,
    from_texts,
    read_fields,
)
from quill.server.service.json_text import JsonError, parse_json

SAMPLING = "sampling_parameters"
FIELDS = (*OPTIONS, Field("logprobs", INTEGER, "of the so many likeliest tokens", "logprobs"))
_NO_TOOLS = "Call tools over gRPC (quill.v1) or HTTP"
UNSUPPORTED = (
    *REFUSED,
    Refused("tools", ([],), _NO_TOOLS),
    Refused("tool_choice", ("none",), _NO_TOOLS),
)
MESSAGE = (
    Field("role", STRING, "system, user or assistant", is_required=True),
    Field("content", STRING, "what is said", is_required=True),
)
TIMEOUT = "timeout"  # Triton's, in microseconds
# Triton's own parameters, which are no options. Sequences are its word for calls with a memory.
TRITONS = ("sequence_id", "sequence_start", "sequence_end", "triton_enable_empty_final_response")
DEFAULT_MAX_TOKENS = 16  # vLLM's


@dataclass(frozen=True, kw_only=True)
class Inference:
    """A request, and how its answer is told."""

    id: str
    model_name: str
    message: pb.GenerateRequest
    options: Json  # as they were written
    stream: bool  # told as it is made
    prefix: str  # before each answer
    wanted: frozenset[str]  # names of outputs

    def as_written(self, error: InvalidFieldError) -> InvalidFieldError:
        """With the name that the client knows the field by."""
        return as_written(error, self.options, FIELDS)


def read_inference(request: kserve.ModelInferRequest, continues: bool) -> Inference:
    """`continues`: an answer goes on where its text ends, so both are told together."""
    tensors = read_tensors(request, INPUTS)
    if TIMEOUT in request.parameters and timeout_s(request) is None:
        raise InvalidFieldError(TIMEOUT, "must be a number of microseconds above 0")
    options = _options(tensors, request)
    message = _message(tensors, options)
    stream = _flag(tensors, "stream", False)
    whole = not _flag(tensors, "exclude_input_in_output", stream or not continues)
    if whole and stream:
        rule = "an answer that is streamed can't begin with its input. Leave out one of them"
        raise InvalidFieldError("exclude_input_in_output", f"is false and stream is true; {rule}")
    if _flag(tensors, "return_cumulative_logprob", False) and not message.HasField("logprobs"):
        message.logprobs = 0
    return Inference(
        id=request.id,
        model_name=request.model_name,
        message=message,
        options=options,
        stream=stream,
        prefix=message.prompt if whole else "",
        wanted=_wanted(tensors, request.outputs),
    )


def _message(tensors: dict[str, Values], options: Json) -> pb.GenerateRequest:
    message = pb.GenerateRequest(max_new_tokens=DEFAULT_MAX_TOKENS)
    given = [name for name in (TEXT, "messages", "input_ids") if name in tensors]
    if len(given) != 1:
        said = " and ".join(given) or "nothing"
        rule = f"give exactly one of {TEXT}, messages and input_ids"
        raise InvalidFieldError("inputs", f"have {said} to be answered; {rule}")
    match given[0]:
        case "messages":
            message.messages.messages.extend(_conversation(tensors["messages"][0]))
        case "input_ids":
            message.prompt_ids.ids.extend(tensors["input_ids"])
        case _:
            message.prompt = _text(TEXT, tensors[TEXT][0])
    fill(message, options, FIELDS)
    return message


def _conversation(raw: bytes) -> list[pb.Message]:
    messages = _json("messages", raw)
    if not isinstance(messages, list):
        raise InvalidFieldError("messages", "must be a JSON list of objects with role and content")
    return [pb.Message(**read_fields(each, MESSAGE)) for each in messages]


def _options(tensors: dict[str, Values], request: kserve.ModelInferRequest) -> Json:
    """From the tensor, if it is there, else from the request's parameters."""
    given = {name: read_parameter(value) for name, value in request.parameters.items()}
    given = {name: value for name, value in given.items() if name not in (*TRITONS, TIMEOUT)}
    if SAMPLING in tensors:
        given = {"priority": given.get("priority")} | _object(tensors[SAMPLING][0])
    return read_fields(from_texts(given, FIELDS), FIELDS, UNSUPPORTED)


def _object(raw: bytes) -> Json:
    options = _json(SAMPLING, raw)
    if not isinstance(options, dict):
        raise InvalidFieldError(SAMPLING, "must be a JSON object")
    return options


def _json(name: str, raw: bytes) -> Any:
    try:
        return parse_json(raw)
    except JsonError as error:
        raise InvalidFieldError(name, str(error)) from None


def _text(name: str, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise InvalidFieldError(name, "isn't UTF-8") from None


def _flag(tensors: dict[str, Values], name: str, otherwise: bool) -> bool:
    return bool(tensors[name][0]) if name in tensors else otherwise


def _wanted(
    tensors: dict[str, Values],
    named: Sequence[kserve.ModelInferRequest.InferRequestedOutputTensor],
) -> frozenset[str]:
    for each in named:
        if each.name not in OUTPUTS:
            rule = f"there are {', '.join(OUTPUTS)}"
            raise InvalidFieldError("outputs", f"have {each.name[:MAX_NAME]!r}; {rule}")
        if SHARED_MEMORY in each.parameters:
            raise InvalidFieldError(each.name, "is wanted in shared memory; take it as a message")
    wanted = {"text_output"}
    wanted |= {output for flag, output in ON_DEMAND.items() if _flag(tensors, flag, False)}
    return frozenset(wanted & {each.name for each in named} if named else wanted)


def timeout_s(request: kserve.ModelInferRequest) -> float | None:
    """None: it has none, or none that can be used."""
    if TIMEOUT not in request.parameters:
        return None
    try:
        wanted_s = float(read_parameter(request.parameters[TIMEOUT])) / 1e6
    except (TypeError, ValueError):
        return None
    return wanted_s if 0 < wanted_s < 1e9 else None
