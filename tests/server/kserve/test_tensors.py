"""Tensors on the wire: both ways to send them, and what is wrong with one, by its name."""

from collections.abc import Callable

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


Request = kserve.ModelInferRequest


def rename(request: Request) -> None:
    request.inputs[0].name = "prompt"


def retype(request: Request) -> None:
    request.inputs[0].datatype = "INT32"


def repeat(request: Request) -> None:
    request.inputs.append(request.inputs[0])
    request.raw_input_contents.append(request.raw_input_contents[0])


def reshape(*shape: int) -> Callable[[Request], None]:
    def change(request: Request) -> None:
        request.inputs[1].shape[:] = shape

    return change


def refill(place: int, raw: bytes) -> Callable[[Request], None]:
    def change(request: Request) -> None:
        request.raw_input_contents[place] = raw

    return change


def leave_out(request: Request) -> None:
    del request.raw_input_contents[1]


def share(request: Request) -> None:
    request.inputs[0].parameters["shared_memory_region"].string_param = "mine"


@pytest.mark.parametrize(("change", "field", "reason"), [
    (rename, "inputs", "'prompt'; there are text, flag, ids"),
    (retype, "text", "it is BYTES"),
    (repeat, "text", "is given twice"),
    (reshape(3), "ids", "go together"),
    (reshape(-1, -2), "ids", "go together"),
    (reshape(*[1] * 9, 2), "ids", "go together"),
    (refill(0, packed("BYTES", [b"a", b"b"])), "text", "exactly 1"),
    (refill(0, b""), "text", "exactly 1"),
    (refill(0, b"\xff\xff\xff\xffa"), "text", "ends within an element"),
    (refill(1, b"\0" * 7), "ids", "each INT32 takes 4"),
    (leave_out, "raw_input_contents", "one for each, or none"),
    (share, "text", "in shared memory"),
])  # fmt: skip
def test_what_is_wrong_is_said_by_name(
    change: Callable[[Request], None], field: str, reason: str
) -> None:
    request = asking(text="a", ids=[1, 2])
    change(request)
    with pytest.raises(InvalidFieldError, match=reason) as caught:
        read_tensors(request, KNOWN)
    assert caught.value.field == field


def test_of_far_too_many_elements_only_one_more_is_read() -> None:
    assert len(unpack(TEXT, b"\0" * 4_000_000)) == 2


def test_parameters_keep_their_type() -> None:
    for value in (True, 5, 0.5, "text"):
        assert read_parameter(written(value)) == value
        assert type(read_parameter(written(value))) is type(value)
    assert read_parameter(kserve.InferParameter()) is None
