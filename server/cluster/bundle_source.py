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
from typing import Any

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
            with _reading(source, MANIFEST_FILE):
                manifest = (directory / MANIFEST_FILE).read_bytes()
            _check_hash(source, manifest, manifest_sha256)
        return directory
    files, root = _open(source)
    path = f"{root}/{MANIFEST_FILE}"
    with _reading(source, path):
        manifest = b"".join(_pieces(files, path, MAX_MANIFEST_BYTES))
        if len(manifest) > MAX_MANIFEST_BYTES:
            raise StartError(f"it has more than {MAX_MANIFEST_BYTES} bytes")
    if manifest_sha256 is not None:
        _check_hash(source, manifest, manifest_sha256)
    return _download(source, files, root, manifest)


def _download(source: str, files: Any, root: str, manifest: bytes) -> Path:
    sha256 = hashlib.sha256(manifest).hexdigest()
    downloads = cache_directory() / "fetched"
    downloads.mkdir(parents=True, exist_ok=True)
    place, partial = downloads / sha256, downloads / f".fetching-{sha256}"
    # Several replicas of a machine start at a time: one downloads, the others wait.
    with (downloads / f"{sha256}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.is_dir():
            return place
        shutil.rmtree(partial, ignore_errors=True)  # a killed process's: the lock is ours
        partial.mkdir(0o700)
        try:
            (partial / MANIFEST_FILE).write_bytes(manifest)
            for file in read_manifest(partial).files:
                _download_file(source, files, f"{root}/{file.name}", partial / file.name, file)
            partial.chmod(0o755)
            partial.rename(place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return place


def _download_file(source: str, files: Any, path: str, to: Path, file: File) -> None:
    digest, size = hashlib.sha256(), 0
    with _reading(source, path), to.open("wb") as writer:
        for piece in _pieces(files, path, file.size):
            size += len(piece)
            digest.update(piece)
            writer.write(piece)
        writer.flush()
        os.fsync(writer.fileno())
    if size != file.size or digest.hexdigest() != file.sha256:
        raise BundleError(
            f"{file.name} of {_shown(source)} isn't what its manifest says: it is damaged, or was "
            "changed while it was read. Upload the bundle again, the manifest last"
        )


def _pieces(files: Any, path: str, max_bytes: int) -> Iterator[bytes]:
    """The last one may go beyond `max_bytes`; nothing comes after it."""
    size = 0
    with files.open(path, "rb") as reader:
        while size <= max_bytes and (piece := reader.read(PIECE_BYTES)):
            size += len(piece)
            yield piece


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
def _reading(source: str, path: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # every file system has its own kinds
        text = f"can't read {path} of {source}: {type(error).__name__}: {error}"
        raise StartError(_shown(f"{text}. Can this machine reach it?")) from error


def _check_hash(source: str, manifest: bytes, wanted: str) -> None:
    found = hashlib.sha256(manifest).hexdigest()
    if found != wanted.lower():
        raise BundleError(
            f"the manifest of {_shown(source)} has the SHA-256 {found}, and {wanted} was asked "
            "for: it is another bundle. Give the right one, or leave the hash out"
        )


def _shown(text: str) -> str:
    """Without the passwords that some URLs have."""
    return _PASSWORD.sub("…@", text)
