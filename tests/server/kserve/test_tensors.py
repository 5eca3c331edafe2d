"""Tensors on the wire: both ways to send them, and what is wrong with one, by its name."""

import pytest

from quill.protos import kserve_pb2 as kserve
from quill.server.errors import InvalidFieldError
from quill.server.kserve.tensors import Tensor, pack, read_parameter, read_tensors, unpack
from quill.server.kserve.tensors import write_parameter as written
from tests.server.kserve.asking import asking, packed

TEXT, FLAG, IDS = Tensor("text", "BYTES"), Tensor("flag", "BOOL"), Tensor("ids", "INT32", -1)
KNOWN = {each.name: each for each in (TEXT, FLAG, IDS)}


def test_raw_contents_are_read() -> None:
    request = asking(text="Grüße", flag=True, ids=[3, -1, 2**31 - 1])
    read = read_tensors(request, KNOWN)
    assert read == {"text": ["Grüße".encode()], "flag": [True], "ids": [3, -1, 2**31 - 1]}


def test_typed_contents_are_read() -> None:
    request = kserve.ModelInferRequest()
    text, ids = (
        kserve.InferTensorContents(bytes_contents=[b"a"]),
        kserve.InferTensorContents(int_contents=[1, 2]),
    )
    request.inputs.add(name="text", datatype="BYTES", shape=[1, 1], contents=text)
    request.inputs.add(name="ids", datatype="INT32", shape=[1, 2], contents=ids)
    assert read_tensors(request, KNOWN) == {"text": [b"a"], "ids": [1, 2]}


@pytest.mark.parametrize(("datatype", "values"), [
    ("BYTES", [b"", b"two words", "Grüße".encode()]),
    ("UINT32", [0, 2**32 - 1]),
    ("FP32", [0.5, -2.0]),
    ("BOOL", [True, False]),
])  # fmt: skip
def test_what_is_packed_is_unpacked(datatype: str, values: list[object]) -> None:
    assert unpack(Tensor("any", datatype, -1), pack(datatype, values)) == values


def broken(name: str) -> kserve.ModelInferRequest:
    request = asking(text="a", ids=[1, 2])
    text, ids = request.inputs
    match name:
        case "another tensor":
            text.name = "prompt"
        case "another datatype":
            text.datatype = "INT32"
        case "twice":
            request.inputs.append(text)
            request.raw_input_contents.append(request.raw_input_contents[0])
        case "shape":
            ids.shape[:] = [3]
        case "negative shape":
            ids.shape[:] = [-1, -2]
        case "many dimensions":
            ids.shape[:] = [1] * 9 + [2]
        case "too many elements":
            request.raw_input_contents[0] = packed("BYTES", [b"a", b"b"])
        case "no element":
            request.raw_input_contents[0] = b""
        case "cut short":
            request.raw_input_contents[0] = b"\xff\xff\xff\xffa"
        case "half a number":
            request.raw_input_contents[1] = b"\0" * 7
        case "missing contents":
            del request.raw_input_contents[1]
        case "shared memory":
            text.parameters["shared_memory_region"].string_param = "mine"
    return request


@pytest.mark.parametrize(("name", "field", "reason"), [
    ("another tensor", "inputs", "'prompt'; there are text, flag, ids"),
    ("another datatype", "text", "it is BYTES"),
    ("twice", "text", "is given twice"),
    ("shape", "ids", "go together"),
    ("negative shape", "ids", "go together"),
    ("many dimensions", "ids", "go together"),
    ("too many elements", "text", "exactly 1"),
    ("no element", "text", "exactly 1"),
    ("cut short", "text", "ends within an element"),
    ("half a number", "ids", "each INT32 takes 4"),
    ("missing contents", "raw_input_contents", "one for each, or none"),
    ("shared memory", "text", "in shared memory"),
])  # fmt: skip
def test_what_is_wrong_is_said_by_name(name: str, field: str, reason: str) -> None:
    with pytest.raises(InvalidFieldError, match=reason) as caught:
        read_tensors(broken(name), KNOWN)
    assert caught.value.field == field


def test_of_far_too_many_elements_only_one_more_is_read() -> None:
    assert len(unpack(TEXT, b"\0" * 4_000_000)) == 2


def test_parameters_keep_their_type() -> None:
    for value in (True, 5, 0.5, "text"):
        assert read_parameter(written(value)) == value
        assert type(read_parameter(written(value))) is type(value)
    assert read_parameter(kserve.InferParameter()) is None
