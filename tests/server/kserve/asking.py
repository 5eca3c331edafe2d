"""Requests as Triton's clients make them."""

import struct
from typing import Any

from quill.protos import kserve_pb2 as kserve

FORMATS = {"BOOL": "?", "INT32": "i"}


def packed(datatype: str, values: list[Any]) -> bytes:
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(each)) + each for each in values)
    return struct.pack(f"<{len(values)}{FORMATS[datatype]}", *values)


def asking(
    parameters: dict[str, kserve.InferParameter] | None = None, **tensors: Any
) -> kserve.ModelInferRequest:
    """A tensor for each word: text, true or false, or token ids."""
    request = kserve.ModelInferRequest(model_name="quill", id="7", parameters=parameters or {})
    for name, value in tensors.items():
        datatype, values = _typed(value)
        request.inputs.add(name=name, datatype=datatype, shape=[len(values)])
        request.raw_input_contents.append(packed(datatype, values))
    return request


def _typed(value: Any) -> tuple[str, list[Any]]:
    match value:
        case str():
            return "BYTES", [value.encode()]
        case bool():
            return "BOOL", [value]
        case _:
            return "INT32", list(value)
