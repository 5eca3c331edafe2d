"""A GGUF file is read as the gguf package reads it; a damaged one is an error, never a crash."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quill.model.checkpoint.checkpoint import check_weights
from quill.model.errors import CheckpointError, ModelError, UnsupportedError
from quill.model.importers import gguf_file
from quill.model.importers.gguf_file import GgufFile
from quill.model.importers.gguf_llama import read_gguf
from quill.model.network.transformer import Transformer
from tests.model.conftest import MakeGguf

U32, U64 = "<I", "<Q"


@pytest.fixture
def tiny_bytes(make_gguf: MakeGguf) -> bytes:
    return make_gguf().read_bytes()


def open_bytes(directory: Path, content: bytes) -> GgufFile:
    path = directory / "changed.gguf"
    path.write_bytes(content)
    return GgufFile(path)


def header(num_tensors: int, num_entries: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack(U32, version) + struct.pack("<QQ", num_tensors, num_entries)


def string(text: bytes) -> bytes:
    return struct.pack(U64, len(text)) + text


def tensor(name: bytes, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<{len(shape)}Q", *shape)
    return string(name) + struct.pack(U32, len(shape)) + dims + struct.pack("<IQ", kind, offset)


def test_metadata_and_tensors_are_those_that_the_gguf_package_finds(make_gguf: MakeGguf) -> None:
    path = make_gguf({"general.odd": True, "general.list": [1.5, 2.5]})
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    for name, entry in theirs.fields.items():
        if not name.startswith("GGUF."):
            assert ours.metadata.get(name) == entry.contents()
    assert [*ours.tensors] == [tensor.name for tensor in theirs.tensors]
    for expected in theirs.tensors:
        info = ours.tensors[expected.name]
        assert info.shape == tuple(reversed(expected.shape.tolist()))
        assert ours.rows(info.name).tobytes() == expected.data.tobytes()


def test_every_number_type_of_the_metadata_is_read(tmp_path: Path) -> None:
    kinds = [(0, "<B", 7), (1, "<b", -7), (2, "<H", 700), (3, "<h", -700), (4, "<I", 70_000)]
    kinds += [(5, "<i", -70_000), (10, "<Q", 2**40), (11, "<q", -(2**40))]
    body = b"".join(
        string(b"n%d" % kind) + struct.pack(U32, kind) + struct.pack(code, value)
        for kind, code, value in kinds
    )
    body += string(b"f") + struct.pack("<If", 6, 0.5) + string(b"d") + struct.pack("<Id", 12, 0.1)
    file = open_bytes(tmp_path, header(0, len(kinds) + 2) + body)
    assert [file.metadata.integer(f"n{kind}") for kind, _, _ in kinds] == [v for _, _, v in kinds]
    assert (file.metadata.number("f"), file.metadata.number("d")) == (0.5, 0.1)


def test_data_begin_at_the_alignment_that_the_file_names(tmp_path: Path) -> None:
    entry = string(b"general.alignment") + struct.pack("<II", 4, 256)
    start = header(1, 1) + entry + tensor(b"some", [4])
    file = open_bytes(tmp_path, start.ljust(256, b"\xff") + struct.pack("<4f", 1, 2, 3, 4))
    assert file.rows("some").view(np.float32).tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04" + bytes(100), b"\x00" * 64])
def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"changed\.gguf"):
        open_bytes(tmp_path, content)


def test_a_missing_file_and_a_directory_are_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(CheckpointError, match="can't read"):
            GgufFile(path)


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_other_versions_and_big_endian_files_are_refused(tmp_path: Path, version: int) -> None:
    with pytest.raises(UnsupportedError, match=f"version {version}"):
        open_bytes(tmp_path, header(0, 0, version))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(2**60, 0), "tensors in the"),
        (header(0, 2**60), "metadata entries in the"),
        (header(0, 1) + struct.pack(U64, 2**62) + bytes(64), "middle of its header"),
        (header(0, 1) + string(b"a") + struct.pack("<IIQ", 9, 0, 2**60), "numbers in a list"),
        (header(0, 1) + string(b"a") + struct.pack("<IIQ", 9, 8, 2**60), "texts in a list"),
        (header(0, 1) + string(b"a") + struct.pack("<IIQ", 9, 9, 1) + bytes(64), "unknown type 9"),
        (header(0, 1) + string(b"a") + struct.pack(U32, 99) + bytes(64), "unknown type 99"),
        (header(0, 1) + string(b"\xff\xfe") + bytes(64), "isn't UTF-8"),
        (header(0, 2) + (string(b"a") + struct.pack("<IB", 7, 1)) * 2, "'a' twice"),
        (header(1, 0) + tensor(b"big", [2**31, 2**31]) + bytes(64), "tensor big"),
        (header(1, 0) + tensor(b"far", [4], offset=2**63) + bytes(64), "tensor far"),
        (header(1, 0) + tensor(b"none", [0]) + bytes(64), "tensor none"),
        (header(1, 0) + tensor(b"odd", [33], kind=8) + bytes(64), "multiple of 32"),
        (header(1, 0) + tensor(b"deep", [1] * 9) + bytes(64), "9 dimensions"),
        (header(2, 0) + tensor(b"twin", [1]) * 2 + bytes(64), "two tensors 'twin'"),
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_reserved(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_bytes(tmp_path, content)


def test_lists_that_take_much_more_memory_than_the_file_has_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "MAX_LISTED", 100)
    lists = [string(name) + struct.pack("<IIQ", 9, 0, 60) + bytes(60) for name in (b"a", b"b")]
    assert open_bytes(tmp_path, header(0, 1) + lists[0]).metadata.get("a") == [0] * 60
    with pytest.raises(CheckpointError, match="more than 100 numbers in lists"):
        open_bytes(tmp_path, header(0, 2) + b"".join(lists))


def test_an_unknown_number_type_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"tensor odd .* number type 9999"):
        open_bytes(tmp_path, header(1, 0) + tensor(b"odd", [4], kind=9999) + bytes(64))


@pytest.mark.parametrize("alignment", [0, 3])
def test_an_alignment_that_is_no_power_of_two_is_refused(tmp_path: Path, alignment: int) -> None:
    entry = string(b"general.alignment") + struct.pack("<II", 4, alignment)
    with pytest.raises(CheckpointError, match="alignment"):
        open_bytes(tmp_path, header(0, 1) + entry)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_short_anywhere_is_an_error(
    tmp_path: Path, tiny_bytes: bytes, share: float
) -> None:
    with pytest.raises(CheckpointError):
        open_bytes(tmp_path, tiny_bytes[: int(share * len(tiny_bytes))])


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 6000), value=st.integers(0, 255))
def test_a_changed_byte_is_harmless_or_an_error_of_ours(
    tmp_path: Path, tiny_bytes: bytes, place: int, value: int
) -> None:
    changed = bytearray(tiny_bytes)
    changed[place] = value
    try:
        checkpoint = read_gguf(open_bytes(tmp_path, bytes(changed)))
    except ModelError:
        return
    with torch.device("meta"):
        model = Transformer(checkpoint.config)
    check_weights(model, checkpoint.weights)
