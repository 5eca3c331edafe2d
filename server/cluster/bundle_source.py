"""Downloads a bundle to this machine from a URL that fsspec can read: s3://, gs://, https://, …

Knows: manifests, hashes, the cache directory. Does not know: Ray, how a bundle is served.

A downloaded bundle is named after the hash of its manifest, which has the hash of every file. The
bundle gets its name after all files were checked, so it is complete or absent.
"""

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from quill.cache import cache_directory
from quill.export.bundle.manifest import MANIFEST_FILE, File, read_manifest
from quill.export.errors import BundleError
from quill.server.errors import StartError

MAX_MANIFEST_BYTES = 64 * 2**20
PIECE_BYTES = 4 * 2**20
MAX_SILENCE_S = 60.0  # of the remote server
_PASSWORD = re.compile(r"[^/@\s]+:[^/@\s]*@")


def local_bundle(source: str, manifest_sha256: str | None = None) -> Path:
    """The bundle's directory on this machine. `source`: a directory, or a URL of one."""
    if "://" not in source:
        directory = Path(source).expanduser()
        if manifest_sha256 is not None:
            _check_hash(source, _hash_of(directory / MANIFEST_FILE), manifest_sha256)
        return directory
    files, root = _open(source)
    try:
        manifest = _read_manifest(files, root)
    except Exception as error:  # every file system has its own kinds
        raise StartError(_cant_read(source, f"{root}/{MANIFEST_FILE}", error)) from error
    sha256 = hashlib.sha256(manifest).hexdigest()
    if manifest_sha256 is not None:
        _check_hash(source, sha256, manifest_sha256)
    return _fetched(source, files, root, manifest, sha256)


def _fetched(source: str, files: Any, root: str, manifest: bytes, sha256: str) -> Path:
    shelf = cache_directory() / "fetched"
    shelf.mkdir(parents=True, exist_ok=True)
    place = shelf / sha256
    with _only_one(shelf / f"{sha256}.lock"):
        if place.is_dir():
            return place
        beside = shelf / f".fetching-{sha256}"
        shutil.rmtree(beside, ignore_errors=True)  # a killed process's: the lock is ours
        beside.mkdir(0o700)
        try:
            (beside / MANIFEST_FILE).write_bytes(manifest)
            for file in read_manifest(beside).files:
                _fetch(source, files, f"{root}/{file.name}", beside / file.name, file)
            beside.chmod(0o755)
            beside.rename(place)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return place


def _fetch(source: str, files: Any, path: str, to: Path, file: File) -> None:
    digest, size = hashlib.sha256(), 0
    try:
        with files.open(path, "rb") as reader, to.open("wb") as writer:
            for piece in _pieces(reader):
                size += len(piece)
                if size > file.size:
                    break
                digest.update(piece)
                writer.write(piece)
            writer.flush()
            os.fsync(writer.fileno())
    except Exception as error:
        raise StartError(_cant_read(source, path, error)) from error
    if size != file.size or digest.hexdigest() != file.sha256:
        raise BundleError(
            f"{file.name} of {_shown(source)} isn't what its manifest says: it is damaged, or was "
            "changed while it was read. Upload the bundle again, the manifest last"
        )


def _pieces(reader: IO[bytes]) -> Iterator[bytes]:
    while piece := reader.read(PIECE_BYTES):
        yield piece


def _read_manifest(files: Any, root: str) -> bytes:
    content = b""
    with files.open(f"{root}/{MANIFEST_FILE}", "rb") as reader:
        for piece in _pieces(reader):
            content += piece
            if len(content) > MAX_MANIFEST_BYTES:
                raise StartError(f"it has more than {MAX_MANIFEST_BYTES} bytes")
    return content


def _open(source: str) -> tuple[Any, str]:
    """A file system, and the path on it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise StartError(
            f"reading {_shown(source)} needs the package fsspec: install 'quill[cluster]', or give "
            "the path of a directory"
        ) from error
    try:
        files, root = url_to_fs(source, **_options(source))
    except (ImportError, ValueError) as error:
        scheme = source.partition("://")[0]
        raise StartError(
            f"can't read {scheme}:// here: {error}. Install what fsspec needs for it on every "
            "machine, for example s3fs or gcsfs"
        ) from error
    return files, str(root).rstrip("/")


def _options(source: str) -> dict[str, Any]:
    """For HTTP: whole files, since not every server supports ranges, and no total timeout."""
    if not source.startswith(("http://", "https://")):
        return {}
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(total=None, sock_connect=MAX_SILENCE_S, sock_read=MAX_SILENCE_S)
    return {"block_size": 0, "client_kwargs": {"timeout": timeout}}


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Several replicas of a machine start at a time: one downloads, the others wait."""
    with lock.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _hash_of(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise StartError(f"can't read {path}: {error.strerror}") from error


def _check_hash(source: str, found: str, wanted: str) -> None:
    if found != wanted.lower():
        raise BundleError(
            f"the manifest of {_shown(source)} has the SHA-256 {found}, and {wanted} was asked "
            "for: it is another bundle. Give the right one, or leave the hash out"
        )


def _cant_read(source: str, path: str, error: Exception) -> str:
    kind = type(error).__name__
    return _shown(f"can't read {path} of {source}: {kind}: {error}. Can this machine reach it?")


def _shown(text: str) -> str:
    """Without the passwords that some URLs have."""
    return _PASSWORD.sub("…@", text)
