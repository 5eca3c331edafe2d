"""Bundles that come from elsewhere: whole or not at all, and what was asked for."""

import functools
import hashlib
import http.server
import importlib.util
import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from quill.export.bundle.manifest import check_files, read_manifest
from quill.export.errors import BundleError
from quill.server.cluster.replica.bundle_source import local_bundle
from quill.server.errors import StartError
from tests.server.tiny_bundle import TinyBundle


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fetched"


@pytest.fixture
def in_memory(tiny_bundle: TinyBundle) -> Iterator[str]:
    """A URL that no disk has anything to do with."""
    files = fsspec.filesystem("memory")
    files.put(str(tiny_bundle.directory), "/models/tiny", recursive=True)
    yield "memory://models/tiny"
    files.rm("/models", recursive=True)


def sha256_of(directory: Path) -> str:
    return hashlib.sha256((directory / "manifest.json").read_bytes()).hexdigest()


def test_path_is_taken_as_it_is(tiny_bundle: TinyBundle, cache: Path) -> None:
    directory = tiny_bundle.directory
    assert local_bundle(str(directory)) == directory
    assert local_bundle(str(directory), sha256_of(directory)) == directory
    assert not cache.exists()


def test_bundle_is_fetched_whole_and_under_its_hash(
    tiny_bundle: TinyBundle, in_memory: str, cache: Path
) -> None:
    wanted = sha256_of(tiny_bundle.directory)
    found = local_bundle(in_memory, wanted)
    assert found == cache / wanted
    check_files(found, read_manifest(found))
    assert {each.name for each in cache.iterdir()} == {wanted, f"{wanted}.lock"}


def test_files_of_a_url_are_the_same(tiny_bundle: TinyBundle) -> None:
    found = local_bundle(f"file://{tiny_bundle.directory}")
    assert sha256_of(found) == sha256_of(tiny_bundle.directory)


def test_second_time_only_the_manifest_is_read(in_memory: str) -> None:
    found = local_bundle(in_memory)
    files = fsspec.filesystem("memory")
    for path in files.find("/models/tiny"):
        if not path.endswith("manifest.json"):
            files.rm(path)
    assert local_bundle(in_memory) == found


def test_several_that_begin_at_once_get_the_same(in_memory: str, cache: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = set(threads.map(local_bundle, [in_memory] * 4))
    assert len(found) == 1
    assert not list(cache.glob(".fetching-*"))


def test_another_bundle_than_was_asked_for_is_refused(
    tiny_bundle: TinyBundle, in_memory: str, cache: Path
) -> None:
    for source in (in_memory, str(tiny_bundle.directory)):
        with pytest.raises(BundleError, match="another bundle"):
            local_bundle(source, "0" * 64)
    assert not cache.exists()


@pytest.mark.parametrize("damage", ["changed", "longer", "shorter", "gone"])
def test_damaged_file_leaves_nothing_behind(in_memory: str, cache: Path, damage: str) -> None:
    files = fsspec.filesystem("memory")
    name = json.loads(files.cat("/models/tiny/manifest.json"))["files"][-1]["name"]
    path = f"/models/tiny/{name}"
    content = files.cat(path)
    if damage == "gone":
        files.rm(path)
    else:
        end = {"changed": b" ", "longer": content[-1:] + b" ", "shorter": b""}[damage]
        files.pipe(path, content[:-1] + end)
    with pytest.raises((BundleError, StartError), match=name):
        local_bundle(in_memory)
    assert [each.suffix for each in cache.iterdir()] == [".lock"]
    files.pipe(path, content)
    assert local_bundle(in_memory).is_dir(), "and it can be tried again"


def test_names_that_leave_the_directory_are_refused(in_memory: str, cache: Path) -> None:
    files = fsspec.filesystem("memory")
    manifest = json.loads(files.cat("/models/tiny/manifest.json"))
    manifest["files"][0]["name"] = "../../outside"
    files.pipe("/models/tiny/manifest.json", json.dumps(manifest).encode())
    with pytest.raises(BundleError):
        local_bundle(in_memory)
    assert [each.suffix for each in cache.iterdir()] == [".lock"]


def test_what_is_missing_is_told_without_passwords() -> None:
    with pytest.raises(StartError, match="can't read") as caught:
        local_bundle("memory://user:secret@models/none")
    assert "secret" not in str(caught.value)
    with pytest.raises(StartError, match="nowhere://"):
        local_bundle("nowhere://models/none")


@pytest.mark.skipif(
    importlib.util.find_spec("aiohttp") is None, reason="fsspec reads http with aiohttp alone"
)
def test_bundle_comes_over_http(tiny_bundle: TinyBundle, tmp_path: Path) -> None:
    shutil.copytree(tiny_bundle.directory, tmp_path / "models" / "tiny")
    handler = functools.partial(_Quiet, directory=str(tmp_path / "models"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = local_bundle(f"http://127.0.0.1:{server.server_port}/tiny")
        server.shutdown()
    check_files(found, read_manifest(found))


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass
