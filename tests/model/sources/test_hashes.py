"""Hashes of files are remembered until the files change."""

import hashlib
from pathlib import Path

import pytest

from quill.model.sources import hashes
from quill.model.sources.hashes import remember, sha256_of


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUILL_CACHE", str(tmp_path / "cache"))


def test_a_file_is_hashed_again_only_when_it_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    assert sha256_of([path]) == [hashlib.sha256(b"one").hexdigest()]
    with monkeypatch.context() as patched:
        patched.setattr(hashes, "_hash_all", None)
        assert sha256_of([path]) == [hashlib.sha256(b"one").hexdigest()]
    path.write_bytes(b"three")
    assert sha256_of([path]) == [hashlib.sha256(b"three").hexdigest()]


def test_what_was_hashed_while_it_was_written_is_not_read_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, other = tmp_path / "weights", tmp_path / "other"
    path.write_bytes(b"one")
    other.write_bytes(b"two")
    sha256_of([other])
    remember({path: hashlib.sha256(b"one").hexdigest()})
    monkeypatch.setattr(hashes, "_hash_all", None)
    assert sha256_of([path, other]) == [
        hashlib.sha256(each).hexdigest() for each in (b"one", b"two")
    ]


def test_where_nothing_can_be_written_files_are_hashed_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, no_directory = tmp_path / "weights", tmp_path / "file"
    path.write_bytes(b"one")
    no_directory.touch()
    monkeypatch.setenv("QUILL_CACHE", str(no_directory / "cache"))
    assert sha256_of([path]) == [hashlib.sha256(b"one").hexdigest()]
