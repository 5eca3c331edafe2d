"""Answers as tensors, whole or as they come.

Knows: generation.proto's answers, the tensors of the model's card. Does not know: gRPC, who asks.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quill.protos import generation_pb2 as pb
from quill.protos import kserve_pb2 as kserve
from quill.server.errors import RequestError, status_name
from quill.server.kserve.model_card import OUTPUTS, VERSION
from quill.server.kserve.requests import Inference
from quill.server.kserve.tensors import add_output, write_parameter

FINAL = "triton_final_response"
# vLLM's names. It has one for whatever cuts an answer short.
FINISH = {
    pb.FINISH_REASON_UNSPECIFIED: "None",
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_EOS: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_CANCELLED: "abort",
    pb.FINISH_REASON_DEADLINE: "abort",
}


@dataclass
class _Sequence:
    """What one response says of a sequence, and what was said before."""

    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[pb.TokenLogprobs] = ()
    finish_reason: pb.FinishReason = pb.FINISH_REASON_UNSPECIFIED
    cumulative: float = 0.0

    def take(self, part: pb.Sequence | pb.GenerateChunk) -> None:
        self.text, self.token_ids, self.logprobs = part.text, part.token_ids, part.logprobs
        self.finish_reason = part.finish_reason or self.finish_reason
        self.cumulative += sum(each.logprob for each in part.logprobs)

    def clear(self) -> None:
        """Nothing is new of it. Why it ended, and its sum, stay."""
        self.text, self.token_ids, self.logprobs = "", (), ()


@dataclass
class Answering:
    """Makes the responses to one request, in the order of its chunks."""

    inference: Inference
    _sequences: list[_Sequence] = field(init=False)

    def __post_init__(self) -> None:
        message = self.inference.message
        number = message.num_sequences if message.HasField("num_sequences") else 1
        self._sequences = [_Sequence() for _ in range(number)]

    def whole(self, answer: pb.GenerateResponse) -> kserve.ModelInferResponse:
        for sequence, part in zip(self._sequences, answer.sequences, strict=True):
            sequence.take(part)
        first = answer.sequences[0]
        end = pb.GenerateChunk(
            finish_reason=first.finish_reason,
            usage=answer.usage,
            seed=answer.seed,
            timings=answer.timings,
            request_id=answer.request_id,
        )
        return self._response(end, self.inference.prefix)

    def part(self, chunk: pb.GenerateChunk) -> kserve.ModelInferResponse:
        for sequence in self._sequences:
            sequence.clear()
        self._sequences[chunk.sequence].take(chunk)
        return self._response(chunk, "")

    def _response(self, end: pb.GenerateChunk, prefix: str) -> kserve.ModelInferResponse:
        response = _empty(self.inference.model_name, self.inference.id)
        for name, write in _WRITERS.items():
            if name in self.inference.wanted:
                add_output(response, OUTPUTS[name], [write(each) for each in self._sequences])
        if "text_output" in self.inference.wanted:
            texts = [(prefix + each.text).encode() for each in self._sequences]
            add_output(response, OUTPUTS["text_output"], texts)
        if "num_input_tokens" in self.inference.wanted and end.HasField("usage"):
            add_output(response, OUTPUTS["num_input_tokens"], [end.usage.prompt_tokens])
        is_final = all(each.finish_reason for each in self._sequences)
        said: dict[str, Any] = {FINAL: is_final}
        if end.finish_reason and not end.sequence:
            said |= _ending(end)
        for name, value in said.items():
            response.parameters[name].CopyFrom(write_parameter(value))
        return response


def failure(
    request: kserve.ModelInferRequest, error: RequestError
) -> kserve.ModelStreamInferResponse:
    """Only streams have it: other calls end with a status, whose name stands first here."""
    response = _empty(request.model_name, request.id)
    response.parameters[FINAL].CopyFrom(write_parameter(True))
    reason = f"{status_name(error)}: {error}"
    return kserve.ModelStreamInferResponse(error_message=reason, infer_response=response)


def _empty(model_name: str, id: str) -> kserve.ModelInferResponse:
    return kserve.ModelInferResponse(model_name=model_name, model_version=VERSION, id=id)


def _ending(end: pb.GenerateChunk) -> dict[str, Any]:
    """What generation.proto says of an answer's end, and tensors have no place for."""
    return {
        "quill_request_id": end.request_id,
        "quill_seed": end.seed,
        "quill_finish_reason": pb.FinishReason.Name(end.finish_reason),
        "quill_prompt_tokens": end.usage.prompt_tokens,
        "quill_cached_tokens": end.usage.cached_tokens,
        "quill_queue_ms": end.timings.queue_ms,
        "quill_first_token_ms": end.timings.first_token_ms,
        "quill_total_ms": end.timings.total_ms,
    }


def _logprobs(sequence: _Sequence) -> bytes:
    """As vLLM has them: a dictionary for each token, by token id. A rank may be unknown."""
    return json.dumps([_one_logprob(each) for each in sequence.logprobs]).encode()


def _one_logprob(token: pb.TokenLogprobs) -> dict[int, dict[str, Any]]:
    told = {token.token_id: _entry(token.logprob, None, token.text)}
    for rank, each in enumerate(token.top, 1):
        told[each.token_id] = _entry(each.logprob, rank, each.text)
    return told


def _entry(logprob: float, rank: int | None, text: str) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": text}


_WRITERS: dict[str, Callable[[_Sequence], Any]] = {
    "finish_reason": lambda each: FINISH[each.finish_reason].encode(),
    "cumulative_logprob": lambda each: each.cumulative,
    "logprobs": _logprobs,
    "num_output_tokens": lambda each: len(each.token_ids),
    "token_ids": lambda each: json.dumps([*each.token_ids]).encode(),
}
