"""What was loaded from a file is out of the file's reach."""

import mmap
import os
from pathlib import Path

import pytest

from quill.server.loading.engine_factory import open_bundle, open_engine
from quill.server.machine import memory
from quill.server.machine.memory import CHUNK_BYTES, detach
from quill.server.request import Limits
from tests.server.tiny_bundle import TinyBundle

LENGTH = 2 * CHUNK_BYTES + 5000


def write(path: Path) -> bytes:
    path.write_bytes(os.urandom(LENGTH))
    return path.read_bytes()


def private_mapping(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def is_mapped(path: Path) -> bool:
    return str(path) in memory.MAPS.read_text()


def test_mapping_keeps_what_it_had_when_the_file_is_written_over(tmp_path: Path) -> None:
    path, other = tmp_path / "a file", tmp_path / "another"
    content = write(path)
    write(other)
    with private_mapping(path) as mapping, private_mapping(other):
        assert is_mapped(path)
        assert LENGTH <= detach(path) < LENGTH + mmap.PAGESIZE
        assert not is_mapped(path)
        assert is_mapped(other)
        path.write_bytes(b"")
        assert mapping[:] == content
        assert detach(path) == 0


def test_link_to_the_file_will_do(tmp_path: Path) -> None:
    write(tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with private_mapping(tmp_path / "link"):
        assert detach(tmp_path / "link") >= LENGTH


def test_engine_has_nothing_of_its_bundle_mapped(tiny_bundle: TinyBundle) -> None:
    bundle = open_bundle(tiny_bundle.directory, "fp32")
    limits = Limits(max_num_seqs=1, context=64, num_blocks=4)
    engine = open_engine(bundle, limits, 1)
    assert not is_mapped(tiny_bundle.directory)
    assert engine.is_idle


def test_without_a_list_of_mappings_nothing_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "MAPS", tmp_path / "none")
    assert detach(tmp_path / "file") == 0
