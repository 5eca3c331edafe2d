"""KServe v2 over gRPC, as Triton's clients use it: a stream for each request.

Knows: KServe's tensors of a request and of a response. Does not know: clocks.
"""

import json
import struct
from collections.abc import Sequence
from typing import Any

import grpc

from quill.loadtest.protocols.grpc import CHANNEL_OPTIONS, CallError, Chunks, call_error
from quill.loadtest.protocols.http import messages_json, options_json
from quill.protos import generation_pb2 as pb
from quill.protos import kserve_pb2 as kserve
from quill.protos import kserve_pb2_grpc as kserve_grpc
from quill.server.client.access import Access

MODEL = "quill"  # whatever is served
_FLAGS = ("stream", "exclude_input_in_output", "return_token_ids")


class KserveClient:
    def __init__(self, address: str, access: Access | None = None) -> None:
        access = access or Access()
        self._channel = access.channel(address, CHANNEL_OPTIONS)
        self._stub = kserve_grpc.GRPCInferenceServiceStub(self._channel)
        self._metadata = access.metadata

    def stream(self, request: pb.GenerateRequest, timeout_s: float) -> Chunks:
        requests = iter([infer_request(request)])
        call = self._stub.ModelStreamInfer(requests, timeout=timeout_s, metadata=self._metadata)
        try:
            for response in call:
                yield from read_response(response)
        except grpc.RpcError as error:
            raise call_error(error) from error
        finally:
            call.cancel()

    def embed(self, request: pb.EmbedRequest, timeout_s: float) -> pb.EmbedResponse:
        raise CallError("UNIMPLEMENTED", "KServe v2 has no embeddings")

    def close(self) -> None:
        self._channel.close()


def infer_request(request: pb.GenerateRequest) -> kserve.ModelInferRequest:
    infer = kserve.ModelInferRequest(model_name=MODEL)
    match request.WhichOneof("input"):
        case "prompt":
            _add(infer, "text_input", [request.prompt.encode()])
        case "messages":
            _add(infer, "messages", [json.dumps(messages_json(request)).encode()])
        case "prompt_ids":
            ids = request.prompt_ids.ids
            infer.inputs.add(name="input_ids", datatype="INT32", shape=[len(ids)])
            infer.raw_input_contents.append(struct.pack(f"<{len(ids)}i", *ids))
    _add(infer, "sampling_parameters", [json.dumps(options_json(request)).encode()])
    for name in _FLAGS:
        infer.inputs.add(name=name, datatype="BOOL", shape=[1])
        infer.raw_input_contents.append(b"\1")
    return infer


def _add(infer: kserve.ModelInferRequest, name: str, values: Sequence[bytes]) -> None:
    infer.inputs.add(name=name, datatype="BYTES", shape=[len(values)])
    infer.raw_input_contents.append(
        b"".join(len(each).to_bytes(4, "little") + each for each in values)
    )


def read_response(response: kserve.ModelStreamInferResponse) -> list[pb.GenerateChunk]:
    """A chunk for each sequence with new tokens, text or an end."""
    if response.error_message:
        status, _, message = response.error_message.partition(": ")
        raise CallError(status, message)
    result = response.infer_response
    end = result.parameters
    tokens = _strings(result, "token_ids")
    chunks = [
        pb.GenerateChunk(sequence=number, text=text.decode(), token_ids=json.loads(ids))
        for number, (text, ids) in enumerate(
            zip(_strings(result, "text_output"), tokens, strict=True)
        )
    ]
    if "quill_finish_reason" in end:
        chunks[0].MergeFrom(_finish(end))
    return [each for each in chunks if each.token_ids or each.text or each.finish_reason]


def _finish(end: Any) -> pb.GenerateChunk:
    return pb.GenerateChunk(
        finish_reason=end["quill_finish_reason"].string_param,
        seed=end["quill_seed"].uint64_param,
        request_id=end["quill_request_id"].string_param,
        usage=pb.Usage(
            prompt_tokens=end["quill_prompt_tokens"].uint64_param,
            cached_tokens=end["quill_cached_tokens"].uint64_param,
        ),
        timings=pb.Timings(
            queue_ms=end["quill_queue_ms"].double_param,
            first_token_ms=end["quill_first_token_ms"].double_param,
            total_ms=end["quill_total_ms"].double_param,
        ),
    )


def _strings(result: kserve.ModelInferResponse, name: str) -> list[bytes]:
    place = next(i for i, each in enumerate(result.outputs) if each.name == name)
    raw, values, at = result.raw_output_contents[place], [], 0
    while at < len(raw):
        begin = at + 4
        at = begin + int.from_bytes(raw[at:begin], "little")
        values.append(raw[begin:at])
    return values
