"""The wire is documented, and the committed code is made from it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import duration_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet
from google.rpc import error_details_pb2 as google_details
from google.rpc import status_pb2
from grpc_tools import protoc

from quill.protos import error_details_pb2, generation_pb2, generation_pb2_grpc
from quill.protos.generate import SOURCES, generate, stale

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "protos/generation.proto"


def test_committed_code_is_what_protoc_makes() -> None:
    assert stale(ROOT) == []


def test_changed_source_makes_the_code_stale(tmp_path: Path) -> None:
    (tmp_path / "protos").mkdir()
    for name in SOURCES:
        path = Path("protos", f"{name}.proto")
        (tmp_path / path).write_bytes((ROOT / path).read_bytes())
    source = (ROOT / SOURCE).read_text(encoding="utf-8")
    generate(tmp_path, tmp_path)
    assert stale(tmp_path) == []
    changed = source.replace("string prompt = 1;", "string prompt = 99;")
    (tmp_path / SOURCE).write_text(changed, encoding="utf-8")
    assert stale(tmp_path) == ["protos/generation_pb2.py"]


@pytest.mark.parametrize("source", [SOURCE, "protos/kserve.proto"])
def test_every_call_message_field_and_value_has_a_comment(source: str, tmp_path: Path) -> None:
    described = tmp_path / "set"
    protoc.main(
        [
            "protoc",
            f"-I{ROOT}",
            "--include_source_info",
            f"--descriptor_set_out={described}",
            source,
        ]
    )
    file = FileDescriptorSet.FromString(described.read_bytes()).file[0]
    commented = {tuple(at.path) for at in file.source_code_info.location if at.leading_comments}
    wanted: dict[tuple[int, ...], str] = {
        (6, 0, 2, i): call.name for i, call in enumerate(file.service[0].method)
    }
    for i, message in enumerate(file.message_type):
        wanted |= dict(fields_of(message, (4, i)))
    for i, enum in enumerate(file.enum_type):
        for j, value in enumerate(enum.value):
            wanted[5, i, 2, j] = value.name
    assert [name for path, name in wanted.items() if path not in commented] == []


def fields_of(
    message: DescriptorProto, place: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], str]]:
    """With those of the messages within it."""
    for i, field in enumerate(message.field):
        yield (*place, 2, i), f"{message.name}.{field.name}"
    for i, inner in enumerate(message.nested_type):
        if not inner.options.map_entry:
            yield from fields_of(inner, (*place, 3, i))


def test_unset_differs_from_zero_where_it_must() -> None:
    request = generation_pb2.GenerateRequest(temperature=0.0, seed=0)
    unset = {"max_new_tokens", "top_k", "top_p", "min_p", "num_sequences", "logprobs"}
    assert all(not request.HasField(name) for name in unset)
    assert request.HasField("temperature")
    assert request.HasField("seed")


def test_service_has_the_calls_of_the_design() -> None:
    service = generation_pb2.DESCRIPTOR.services_by_name["TextGeneration"]
    assert service.full_name == "quill.v1.TextGeneration"
    assert {call.name for call in service.methods} == {
        *("Generate", "GenerateStream", "Tokenize", "Detokenize", "Score", "GetModel"),
        *("Embed", "FillMask"),
    }
    assert hasattr(generation_pb2_grpc, "TextGenerationServicer")


def test_error_details_are_googles_on_the_wire() -> None:
    violation = google_details.BadRequest.FieldViolation(field="top_k", description="too small")
    bad_request = google_details.BadRequest(field_violations=[violation])
    retry = google_details.RetryInfo(retry_delay=duration_pb2.Duration(seconds=2, nanos=5))
    status = status_pb2.Status(code=3, message="no")
    status.details.add().Pack(bad_request)
    theirs = (status, bad_request, retry)
    ours = (
        error_details_pb2.ErrorStatus(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    for their, our in zip(theirs, ours, strict=True):
        our.ParseFromString(their.SerializeToString())
        our.DiscardUnknownFields()
        assert our.SerializeToString() == their.SerializeToString(), "every field is known"
    assert ours[1].field_violations[0].field == "top_k"
    assert ours[2].retry_delay.nanos == 5
