"""An inference request read from tensors, and its outputs written as tensors.

Knows: the tensors of the model card, vLLM's names of options. Does not know: gRPC, limits, models.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from quill.protos import kserve_pb2 as kserve
from quill.server.errors import InvalidFieldError, RequestError, status_name
from quill.server.fields import FINISH_REASON, GENERATE, VLLM_FINISH_REASON
from quill.server.frontend.answer import Chunk, Result, ranked_logprobs
from quill.server.frontend.json_options import OPTIONS, UNSUPPORTED, generate_spec, option_fields
from quill.server.frontend.json_values import (
    STRING,
    Json,
    JsonError,
    JsonField,
    Unsupported,
    from_texts,
    parse_json,
    read_fields,
)
from quill.server.frontend.spec import ChatMessage, Conversation, GenerateSpec, Prompt
from quill.server.kserve.tensors import (
    INPUTS,
    MAX_NAME,
    ON_DEMAND,
    OUTPUTS,
    SHARED_MEMORY,
    TEXT,
    VERSION,
    Values,
    add_output,
    read_parameter,
    read_tensors,
    write_parameter,
)
from quill.server.outputs import FinishEvent
from quill.server.text.tokenizer import Text

SAMPLING = "sampling_parameters"
FIELDS = (*OPTIONS, *option_fields(GENERATE["logprobs"]))
_NO_TOOLS = "Call tools over gRPC (quill.v1) or HTTP"
_UNSUPPORTED = (
    *UNSUPPORTED,
    Unsupported("tools", ([],), _NO_TOOLS),
    Unsupported("tool_choice", ("none",), _NO_TOOLS),
)
MESSAGE = (
    JsonField("role", STRING, "system, user or assistant", is_required=True),
    JsonField("content", STRING, "the message", is_required=True),
)
TIMEOUT = "timeout"  # Triton's, in microseconds
# Triton's own parameters, which are no options. Sequences are its word for calls with a memory.
TRITONS = ("sequence_id", "sequence_start", "sequence_end", "triton_enable_empty_final_response")
DEFAULT_MAX_TOKENS = 16  # vLLM's
FINAL = "triton_final_response"


@dataclass(frozen=True, kw_only=True)
class Inference:
    """A request, and how its answer is written."""

    id: str
    model_name: str
    spec: GenerateSpec
    stream: bool  # sent as it is generated
    prefix: str  # before each answer
    wanted: frozenset[str]  # names of outputs


def read_inference(request: kserve.ModelInferRequest, continues: bool) -> Inference:
    """`continues`: an answer continues its text, so the backend returns both together."""
    tensors = read_tensors(request, INPUTS)
    if TIMEOUT in request.parameters and timeout_s(request) is None:
        raise InvalidFieldError(TIMEOUT, "must be a number of microseconds above 0")
    prompt = _prompt(tensors)
    spec = generate_spec(
        prompt, _options(tensors, request), FIELDS, {"max_new_tokens": DEFAULT_MAX_TOKENS}
    )
    stream = _flag(tensors, "stream", False)
    whole = not _flag(tensors, "exclude_input_in_output", stream or not continues)
    if whole and stream:
        rule = "an answer that is streamed can't begin with its input. Leave out one of them"
        raise InvalidFieldError("exclude_input_in_output", f"is false and stream is true; {rule}")
    if _flag(tensors, "return_cumulative_logprob", False):
        spec = replace(spec, options={"logprobs": 0, **spec.options})
    return Inference(
        id=request.id,
        model_name=request.model_name,
        spec=spec,
        stream=stream,
        prefix=prompt.value if whole and isinstance(prompt.value, str) else "",
        wanted=_wanted(tensors, request.outputs),
    )


def _prompt(tensors: dict[str, Values]) -> Prompt:
    given = [name for name in (TEXT, "messages", "input_ids") if name in tensors]
    if len(given) != 1:
        shown = " and ".join(given) or "no prompt"
        rule = f"give exactly one of {TEXT}, messages and input_ids"
        raise InvalidFieldError("inputs", f"have {shown}; {rule}")
    (name,) = given
    if name == "messages":
        return Prompt(name, _conversation(tensors[name][0]))
    if name == "input_ids":
        return Prompt(name, tensors[name])
    try:
        return Prompt(name, tensors[name][0].decode())
    except UnicodeDecodeError:
        raise InvalidFieldError(name, "isn't UTF-8") from None


def _conversation(raw: bytes) -> Conversation:
    messages = _json("messages", raw)
    if not isinstance(messages, list):
        raise InvalidFieldError("messages", "must be a JSON list of objects with role and content")
    return Conversation([ChatMessage(**read_fields(each, MESSAGE)) for each in messages])


def _options(tensors: dict[str, Values], request: kserve.ModelInferRequest) -> Json:
    """From the tensor, if it is there, else from the request's parameters."""
    given = {name: read_parameter(value) for name, value in request.parameters.items()}
    given = {name: value for name, value in given.items() if name not in (*TRITONS, TIMEOUT)}
    if SAMPLING in tensors:
        options = _json(SAMPLING, tensors[SAMPLING][0])
        if not isinstance(options, dict):
            raise InvalidFieldError(SAMPLING, "must be a JSON object")
        given = {"priority": given.get("priority")} | options
    return read_fields(from_texts(given, FIELDS), FIELDS, _UNSUPPORTED)


def _json(name: str, raw: bytes) -> Any:
    try:
        return parse_json(raw)
    except JsonError as error:
        raise InvalidFieldError(name, str(error)) from None


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
    """None: the request has none, or none that can be used."""
    if TIMEOUT not in request.parameters:
        return None
    try:
        wanted_s = float(read_parameter(request.parameters[TIMEOUT])) / 1e6
    except (TypeError, ValueError):
        return None
    return wanted_s if 0 < wanted_s < 1e9 else None


@dataclass
class _Sequence:
    """What a response has of one sequence, and the state since its first chunk."""

    text: Text | None  # spells tokens
    new: Chunk = field(default_factory=lambda: Chunk(0))
    finish: FinishEvent | None = None
    cumulative: float = 0.0

    def take(self, chunk: Chunk) -> None:
        self.new = chunk
        self.finish = chunk.finish or self.finish
        self.cumulative += sum(each.logprob or 0.0 for each in chunk.logprobs)

    def clear(self) -> None:
        """Another sequence has a chunk. The finish reason and the sum stay."""
        self.new = Chunk(0)

    def logprobs(self) -> bytes:
        """One dictionary a token."""
        return json.dumps([ranked_logprobs(each, self.text) for each in self.new.logprobs]).encode()

    def reason(self) -> bytes:
        return b"None" if self.finish is None else VLLM_FINISH_REASON[self.finish.reason].encode()


_WRITERS: dict[str, Callable[[_Sequence], Any]] = {
    "finish_reason": _Sequence.reason,
    "cumulative_logprob": lambda each: each.cumulative,
    "logprobs": _Sequence.logprobs,
    "num_output_tokens": lambda each: len(each.new.token_ids),
    "token_ids": lambda each: json.dumps(each.new.token_ids).encode(),
}


class Responses:
    """The responses to one request, in the order of its chunks."""

    def __init__(self, inference: Inference, num_sequences: int, text: Text | None) -> None:
        self._inference = inference
        self._sequences = [_Sequence(text) for _ in range(num_sequences)]

    def whole(self, result: Result) -> kserve.ModelInferResponse:
        for sequence, chunk in zip(self._sequences, result.sequences, strict=True):
            sequence.take(chunk)
        end = msgspec.structs.replace(
            result.finishes[0], usage=result.usage, timings=result.timings
        )
        return self._response(end, self._inference.prefix)

    def part(self, chunk: Chunk) -> kserve.ModelInferResponse:
        for sequence in self._sequences:
            sequence.clear()
        self._sequences[chunk.sequence].take(chunk)
        return self._response(chunk.finish)

    def _response(self, end: FinishEvent | None, prefix: str = "") -> kserve.ModelInferResponse:
        wanted = self._inference.wanted
        response = _empty(self._inference.model_name, self._inference.id)
        for name, write in _WRITERS.items():
            if name in wanted:
                add_output(response, OUTPUTS[name], [write(each) for each in self._sequences])
        if "text_output" in wanted:
            texts = [(prefix + each.new.text).encode() for each in self._sequences]
            add_output(response, OUTPUTS["text_output"], texts)
        if "num_input_tokens" in wanted and end is not None:
            add_output(response, OUTPUTS["num_input_tokens"], [end.usage.prompt])
        parameters: Json = {FINAL: all(each.finish for each in self._sequences)}
        if end is not None and not end.sequence:
            parameters |= _end_parameters(end)
        for name, value in parameters.items():
            response.parameters[name].CopyFrom(write_parameter(value))
        return response


def failure(
    request: kserve.ModelInferRequest, error: RequestError
) -> kserve.ModelStreamInferResponse:
    """Of a stream only: other calls end with a status, whose name begins the message here."""
    response = _empty(request.model_name, request.id)
    response.parameters[FINAL].CopyFrom(write_parameter(True))
    reason = f"{status_name(error)}: {error}"
    return kserve.ModelStreamInferResponse(error_message=reason, infer_response=response)


def _empty(model_name: str, id: str) -> kserve.ModelInferResponse:
    return kserve.ModelInferResponse(model_name=model_name, model_version=VERSION, id=id)


def _end_parameters(end: FinishEvent) -> Json:
    """What generation.proto reports of an answer's end, and no tensor has."""
    return {
        "quill_request_id": end.request_id,
        "quill_seed": end.seed,
        "quill_finish_reason": FINISH_REASON.proto_name(end.reason),
        "quill_prompt_tokens": end.usage.prompt,
        "quill_cached_tokens": end.usage.cached,
        **{
            f"quill_{name}": each_ms
            for name, each_ms in msgspec.structs.asdict(end.timings).items()
        },
    }
