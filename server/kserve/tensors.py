"""The tensors of a model, as Triton's vLLM backend has them: described, read and written.

Knows: names, datatypes, shapes, raw and typed contents, KServe's ModelMetadata and Triton's
ModelConfig. Does not know: what a tensor's values are for.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quill.protos import kserve_pb2 as kserve
from quill.server.errors import InvalidFieldError

Values = list[Any]
InputTensor = kserve.ModelInferRequest.InferInputTensor

MAX_NAME = 64  # characters of an unknown tensor's name, in an error
MAX_DIMENSIONS = 8
SHARED_MEMORY = "shared_memory_region"
# How a number lies in raw contents, little-endian, and where typed contents have it.
_FORMAT = {"BOOL": "?", "INT32": "i", "UINT32": "I", "FP32": "f"}
_TYPED = {"BOOL": "bool_contents", "INT32": "int_contents", "BYTES": "bytes_contents"}


@dataclass(frozen=True)
class Tensor:
    """What a model says of one. `length`: of elements; -1 is any number."""

    name: str
    datatype: str
    length: int = 1


VERSION = "1"
PLATFORM = "onnxruntime_quill"
BACKEND = "quill"


def _by_name(*tensors: Tensor) -> dict[str, Tensor]:
    return {each.name: each for each in tensors}


TEXT = "text_input"
INPUTS = _by_name(
    Tensor(TEXT, "BYTES"),
    Tensor("stream", "BOOL"),
    Tensor("sampling_parameters", "BYTES"),
    Tensor("exclude_input_in_output", "BOOL"),
    Tensor("return_finish_reason", "BOOL"),
    Tensor("return_cumulative_logprob", "BOOL"),
    Tensor("return_logprobs", "BOOL"),
    Tensor("return_num_input_tokens", "BOOL"),
    Tensor("return_num_output_tokens", "BOOL"),
    # Ours, not the backend's: instead of text_input, and what comes back.
    Tensor("messages", "BYTES"),
    Tensor("input_ids", "INT32", -1),
    Tensor("return_token_ids", "BOOL"),
)
# All but num_input_tokens have an element for each sequence.
OUTPUTS = _by_name(
    Tensor("text_output", "BYTES", -1),
    Tensor("finish_reason", "BYTES", -1),
    Tensor("cumulative_logprob", "FP32", -1),
    Tensor("logprobs", "BYTES", -1),
    Tensor("num_input_tokens", "UINT32"),
    Tensor("num_output_tokens", "UINT32", -1),
    Tensor("token_ids", "BYTES", -1),
)
ON_DEMAND = {f"return_{name}": name for name in OUTPUTS if f"return_{name}" in INPUTS}

_TYPES = {
    "BYTES": kserve.TYPE_STRING,
    "BOOL": kserve.TYPE_BOOL,
    "INT32": kserve.TYPE_INT32,
    "UINT32": kserve.TYPE_UINT32,
    "FP32": kserve.TYPE_FP32,
}


def metadata(name: str) -> kserve.ModelMetadataResponse:
    response = kserve.ModelMetadataResponse(name=name, versions=[VERSION], platform=PLATFORM)
    for tensors, described in ((INPUTS, response.inputs), (OUTPUTS, response.outputs)):
        for each in tensors.values():
            described.add(name=each.name, datatype=each.datatype, shape=[each.length])
    return response


def config(name: str) -> kserve.ModelConfig:
    card = kserve.ModelConfig(
        name=name,
        platform=PLATFORM,
        backend=BACKEND,
        max_batch_size=0,
        model_transaction_policy=kserve.ModelTransactionPolicy(decoupled=True),
    )
    for each in INPUTS.values():
        card.input.add(
            name=each.name,
            data_type=_TYPES[each.datatype],
            dims=[each.length],
            optional=each.name != TEXT,
        )
    for each in OUTPUTS.values():
        card.output.add(name=each.name, data_type=_TYPES[each.datatype], dims=[each.length])
    return card


def read_tensors(
    request: kserve.ModelInferRequest, known: Mapping[str, Tensor]
) -> dict[str, Values]:
    """The inputs by name, or which of them is wrong and why."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        given = f"has {len(raw)} entries for {len(request.inputs)} inputs"
        raise InvalidFieldError("raw_input_contents", f"{given}; give one for each, or none")
    found: dict[str, Values] = {}
    for place, each in enumerate(request.inputs):
        tensor = _known(each, known)
        if each.name in found:
            raise InvalidFieldError(each.name, "is given twice")
        found[each.name] = values = (
            unpack(tensor, raw[place]) if raw else list(_contents(tensor, each))
        )
        _check_shape(tensor, each.shape, len(values))
    return found


def _known(given: InputTensor, known: Mapping[str, Tensor]) -> Tensor:
    tensor = known.get(given.name)
    if tensor is None:
        raise InvalidFieldError(
            "inputs", f"have a tensor {given.name[:MAX_NAME]!r}; there are {', '.join(known)}"
        )
    if SHARED_MEMORY in given.parameters:
        raise InvalidFieldError(given.name, "is in shared memory; send it in the message")
    if given.datatype != tensor.datatype:
        datatype = given.datatype[:MAX_NAME]
        raise InvalidFieldError(given.name, f"has datatype {datatype!r}; it is {tensor.datatype}")
    return tensor


def _check_shape(tensor: Tensor, shape: Sequence[int], length: int) -> None:
    if tensor.length >= 0 and length != tensor.length:
        rule = f"it takes exactly {tensor.length}"
        raise InvalidFieldError(tensor.name, f"has another number of elements; {rule}")
    if len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0 or math.prod(shape) != length:
        given = f"has the shape {list(shape[:MAX_DIMENSIONS])} and {length} elements"
        raise InvalidFieldError(tensor.name, f"{given}; they must go together")


def _contents(tensor: Tensor, given: InputTensor) -> Sequence[Any]:
    """Typed. Only the field of the tensor's own type counts."""
    contents: Sequence[Any] = getattr(given.contents, _TYPED[tensor.datatype])
    return contents


def unpack(tensor: Tensor, raw: bytes) -> Values:
    if tensor.datatype == "BYTES":
        return _unpack_bytes(tensor, raw)
    size = struct.calcsize(_FORMAT[tensor.datatype])
    if len(raw) % size:
        given = f"has {len(raw)} raw bytes"
        raise InvalidFieldError(tensor.name, f"{given}; each {tensor.datatype} takes {size}")
    return list(struct.unpack(f"<{len(raw) // size}{_FORMAT[tensor.datatype]}", raw))


def _unpack_bytes(tensor: Tensor, raw: bytes) -> Values:
    """Each as a 32-bit length, and so many bytes. Of too many, one more than there may be."""
    values: Values = []
    at, most = 0, tensor.length if tensor.length >= 0 else len(raw)
    while at < len(raw) and len(values) <= most:
        begin = at + 4
        end = begin + int.from_bytes(raw[at:begin], "little")
        if begin > len(raw) or end > len(raw):
            rule = "each element is a 32-bit little-endian length and so many bytes"
            raise InvalidFieldError(tensor.name, f"ends within an element; {rule}")
        values.append(raw[begin:end])
        at = end
    return values


def pack(datatype: str, values: Sequence[Any]) -> bytes:
    if datatype == "BYTES":
        return b"".join(len(each).to_bytes(4, "little") + each for each in values)
    return struct.pack(f"<{len(values)}{_FORMAT[datatype]}", *values)


def add_output(response: kserve.ModelInferResponse, tensor: Tensor, values: Sequence[Any]) -> None:
    response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=[len(values)])
    response.raw_output_contents.append(pack(tensor.datatype, values))


def read_parameter(given: kserve.InferParameter) -> Any:
    """None: it has no value."""
    kind = given.WhichOneof("parameter_choice")
    return None if kind is None else getattr(given, kind)


def write_parameter(value: bool | float | str) -> kserve.InferParameter:
    match value:
        case bool():  # before int, which it is too
            return kserve.InferParameter(bool_param=value)
        case int():
            return kserve.InferParameter(uint64_param=value)
        case float():
            return kserve.InferParameter(double_param=value)
        case str():
            return kserve.InferParameter(string_param=value)
