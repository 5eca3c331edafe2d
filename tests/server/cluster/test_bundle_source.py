"""Downloaded bundles are complete or absent, and have the expected hash."""

import functools
import hashlib
import http.server
import importlib.util
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest

from quill.export.bundle.manifest import check_files, read_manifest
from quill.export.errors import BundleError
from quill.server.cluster.bundle_source import local_bundle
from quill.server.errors import StartError
from tests.server.tiny_bundle import TinyBundle


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fetched"


@pytest.fixture
def in_memory(tiny_bundle: TinyBundle) -> Iterator[str]:
    """A URL of fsspec's file system in memory."""
    files = fsspec.filesystem("memory")
    files.put(str(tiny_bundle.directory), "/models/tiny", recursive=True)
    yield "memory://models/tiny"
    files.rm("/models", recursive=True)


def sha256_of(directory: Path) -> str:
    return hashlib.sha256((directory / "manifest.json").read_bytes()).hexdigest()


def test_path_is_used_in_place(tiny_bundle: TinyBundle, cache: Path) -> None:
    directory = tiny_bundle.directory
    assert local_bundle(str(directory)) == directory
    assert local_bundle(str(directory), sha256_of(directory)) == directory
    assert not cache.exists()


def test_bundle_is_downloaded_complete_and_named_by_its_hash(
    tiny_bundle: TinyBundle, in_memory: str, cache: Path
) -> None:
    wanted = sha256_of(tiny_bundle.directory)
    found = local_bundle(in_memory, wanted)
    assert found == cache / wanted
    check_files(found, read_manifest(found))
    assert {each.name for each in cache.iterdir()} == {wanted, f"{wanted}.lock"}


def test_second_download_reads_only_the_manifest(in_memory: str) -> None:
    found = local_bundle(in_memory)
    files = fsspec.filesystem("memory")
    for path in files.find("/models/tiny"):
        if not path.endswith("manifest.json"):
            files.rm(path)
    assert local_bundle(in_memory) == found


def test_concurrent_downloads_give_one_directory(in_memory: str, cache: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = set(threads.map(local_bundle, [in_memory] * 4))
    assert len(found) == 1
    assert not list(cache.glob(".fetching-*"))


def test_another_hash_is_an_error(tiny_bundle: TinyBundle, in_memory: str, cache: Path) -> None:
    for source in (in_memory, str(tiny_bundle.directory)):
        with pytest.raises(BundleError, match="another bundle"):
            local_bundle(source, "0" * 64)
    assert not cache.exists()


@pytest.mark.parametrize("damage", ["changed", "longer", "shorter", "gone"])
def test_damaged_file_leaves_nothing(in_memory: str, cache: Path, damage: str) -> None:
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


def test_names_outside_the_directory_are_errors(in_memory: str, cache: Path) -> None:
    files = fsspec.filesystem("memory")
    manifest = json.loads(files.cat("/models/tiny/manifest.json"))
    manifest["files"][0]["name"] = "../../outside"
    files.pipe("/models/tiny/manifest.json", json.dumps(manifest).encode())
    with pytest.raises(BundleError):
        local_bundle(in_memory)
    assert [each.suffix for each in cache.iterdir()] == [".lock"]


def test_errors_have_no_passwords() -> None:
    with pytest.raises(StartError, match="can't read") as caught:
        local_bundle("memory://user:secret@models/none")
    assert "secret" not in str(caught.value)
    with pytest.raises(StartError, match="nowhere://"):
        local_bundle("nowhere://models/none")


def test_download_removes_the_files_of_a_killed_process(
    tiny_bundle: TinyBundle, in_memory: str, cache: Path
) -> None:
    killed = """if True:
        import fsspec, os, signal, sys
        from quill.server.cluster import bundle_source
        files = fsspec.filesystem("memory")
        files.put(sys.argv[1], "/models/tiny", recursive=True)
        bundle_source._download_file = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        bundle_source.local_bundle("memory://models/tiny")
    """
    command = [sys.executable, "-c", killed, str(tiny_bundle.directory)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert list(cache.glob(".fetching-*")), "it got so far"
    local_bundle(in_memory)
    assert not list(cache.glob(".fetching-*"))


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


class _Breaking(_Quiet):
    """Sends half of every file but manifests."""

    def copyfile(self, source: Any, outputfile: Any) -> None:
        content = source.read()
        half = len(content) if self.path.endswith("manifest.json") else len(content) // 2
        outputfile.write(content[:half])


@contextmanager
def serving(bundle: Path, kind: type[_Quiet]) -> Iterator[str]:
    handler = functools.partial(kind, directory=str(bundle))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


needs_aiohttp = pytest.mark.skipif(
    importlib.util.find_spec("aiohttp") is None, reason="fsspec reads http with aiohttp alone"
)


@needs_aiohttp
def test_http_server_without_ranges(tiny_bundle: TinyBundle, tmp_path: Path) -> None:
    """Such as Python's. By default fsspec reads larger files by ranges."""
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle.directory, bundle)
    manifest = json.loads((bundle / "manifest.json").read_text())
    file = manifest["files"][0]
    content = (bundle / file["name"]).read_bytes().ljust(16 * 2**20)
    (bundle / file["name"]).write_bytes(content)
    file |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with serving(bundle, _Quiet) as url:
        found = local_bundle(url)
    check_files(found, read_manifest(found))


@needs_aiohttp
def test_http_server_that_disconnects_leaves_nothing(tiny_bundle: TinyBundle, cache: Path) -> None:
    with (
        serving(tiny_bundle.directory, _Breaking) as url,
        pytest.raises((BundleError, StartError), match=r"decoder|tokenizer|weights"),
    ):
        local_bundle(url)
    assert [each.suffix for each in cache.iterdir()] == [".lock"]


@pytest.mark.filterwarnings("default")  # of packages that aren't ours
def test_s3_url(tiny_bundle: TinyBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "it needs what tests don't install: pip install 'moto[server]' s3fs"
    pytest.importorskip("s3fs", reason=reason)
    server = pytest.importorskip("moto.server", reason=reason).ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "anybody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "anything")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    try:
        files = fsspec.filesystem("s3")
        files.mkdir("models")
        for file in tiny_bundle.directory.iterdir():
            files.put(str(file), f"models/tiny/{file.name}")
        found = local_bundle("s3://models/tiny", sha256_of(tiny_bundle.directory))
        check_files(found, read_manifest(found))
        with pytest.raises(StartError, match="can't read models/none"):
            local_bundle("s3://models/none")
    finally:
        server.stop()
