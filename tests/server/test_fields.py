"""The table of request fields agrees with generation.proto and with the engine's request."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields as dataclass_fields

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from quill.protos import generation_pb2 as pb
from quill.server import fields
from quill.server.errors import InvalidFieldError
from quill.server.fields import GENERATE, Field
from quill.server.request import BeamParams, Request, SamplingParams

STRUCTURED = {
    "GenerateRequest": {
        *("prompt", "prompt_ids", "messages"),
        *("constraint", "tools", "tool_choice", "parallel_tool_calls"),
    },
    "EmbedRequest": {"inputs"},
    "ScoreRequest": {"text", "token_ids"},
    "FillMaskRequest": {"text", "token_ids"},
}
PROTO_TYPES = {
    "integer": {FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64,
                FieldDescriptor.CPPTYPE_UINT64},
    "number": {FieldDescriptor.CPPTYPE_DOUBLE},
    "boolean": {FieldDescriptor.CPPTYPE_BOOL},
    "strings": {FieldDescriptor.CPPTYPE_STRING},
    "integers": {FieldDescriptor.CPPTYPE_INT32},
    "bias": {FieldDescriptor.CPPTYPE_MESSAGE},
    "choice": {FieldDescriptor.CPPTYPE_ENUM},
}  # fmt: skip


@pytest.mark.parametrize(
    ("message", "table"),
    [
        (pb.GenerateRequest.DESCRIPTOR, fields.GENERATE),
        (pb.EmbedRequest.DESCRIPTOR, fields.EMBED),
        (pb.ScoreRequest.DESCRIPTOR, fields.SCORE),
        (pb.FillMaskRequest.DESCRIPTOR, fields.FILL_MASK),
    ],
)
def test_every_option_of_the_proto_is_in_the_table(
    message: Descriptor, table: Mapping[str, Field]
) -> None:
    assert set(table) == {each.name for each in message.fields} - STRUCTURED[message.name]
    for name, field in table.items():
        assert message.fields_by_name[name].cpp_type in PROTO_TYPES[field.type], name


@pytest.mark.parametrize(
    "choices",
    [fields.EARLY_STOPPING, fields.POOLING, fields.TOOL_MODE, fields.FINISH_REASON, fields.FAMILY],
)
def test_every_value_of_an_enum_is_in_its_table(choices: fields.Choices) -> None:
    names = {choices.proto_name(value) for value in choices.values}
    known = {name for name in dir(pb) if name.startswith(f"{choices.prefix}_")}
    assert known - names <= {f"{choices.prefix}_UNSPECIFIED"}
    assert names <= known


def test_defaults_of_the_table_are_those_of_the_request() -> None:
    known = {
        each.name: each.default
        for kind in (SamplingParams, BeamParams, Request)
        for each in dataclass_fields(kind)
    }
    for name, field in GENERATE.items():
        neutral = field.default if field.off is None else field.off
        if neutral is not None and name in known and name != "num_beams":
            assert known[name] == neutral, name


@pytest.mark.parametrize("name", [name for name, field in GENERATE.items() if not field.is_list])
def test_a_number_just_outside_its_range_is_rejected_by_name(name: str) -> None:
    field = GENERATE[name]
    outside = [float("nan")] if field.type == "number" else []
    if field.minimum is not None:
        outside.append(field.minimum if field.is_open else field.minimum - 1)
        field.check(field.minimum + 1)
    if field.maximum is not None:
        outside.append(field.maximum + 1)
        field.check(field.maximum)
    for value in outside:
        with pytest.raises(InvalidFieldError) as caught:
            field.check(value)
        assert caught.value.field == name


def test_a_limit_of_the_model_replaces_the_tables() -> None:
    GENERATE["max_new_tokens"].check(64, maximum=64)
    with pytest.raises(InvalidFieldError, match="from 1 to 64"):
        GENERATE["max_new_tokens"].check(65, maximum=64)


def test_the_table_needs_neither_grpc_nor_numpy_nor_protobuf() -> None:
    program = "import sys; import quill.server.fields; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not {"grpc", "numpy", "google.protobuf"} & set(done.stdout.split())
