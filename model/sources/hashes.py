"""SHA-256 of files, remembered by size, time of change and inode: gigabytes are hashed once.

Knows: a JSON file in the cache. Does not know: what the files are.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quill.cache import cache_directory
from quill.model.checkpoint.atomic import atomic_file

CHUNK_BYTES = 1 << 24
SHOWN_BYTES = 1 << 28  # from here on hashing takes longer than a moment


def sha256_of(paths: Sequence[Path]) -> list[str]:
    """Of each file; hashed only where it changed since the last time."""
    known = _read()
    paths = [path.absolute() for path in paths]
    stamps = [_stamp(path) for path in paths]
    changed = [
        path
        for path, stamp in zip(paths, stamps, strict=True)
        if known.get(str(path), [None])[:-1] != stamp
    ]
    if changed:
        for path, digest in zip(changed, _hash_all(changed), strict=True):
            known[str(path)] = [*stamps[paths.index(path)], digest]
        _write(known)
    return [str(known[str(path)][-1]) for path in paths]


def remember(digests: Mapping[Path, str]) -> None:
    """The SHA-256 of files that were hashed while they were written."""
    stamped = {path.absolute(): digest for path, digest in digests.items()}
    _write(_read() | {str(path): [*_stamp(path), digest] for path, digest in stamped.items()})


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _hash_all(paths: Sequence[Path]) -> list[str]:
    total = sum(path.stat().st_size for path in paths)
    if total < SHOWN_BYTES:
        return [_hash(path, lambda _: None) for path in paths]
    from quill.model.progress import Display  # imports rich

    num_bytes = 0
    with Display("Hashing", total, in_bytes=True) as display:

        def count(size: int) -> None:
            nonlocal num_bytes
            num_bytes += size
            display.update(num_bytes)

        return [_hash(path, count) for path in paths]


def _hash(path: Path, count: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(CHUNK_BYTES):
            digest.update(part)
            count(len(part))
    return digest.hexdigest()


def _path() -> Path:
    return cache_directory() / "hashes.json"


def _read() -> dict[str, Any]:
    try:
        known = json.loads(_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    entries = known.items() if isinstance(known, dict) else ()
    return {name: entry for name, entry in entries if isinstance(entry, list) and len(entry) == 4}


def _write(known: dict[str, Any]) -> None:
    """Two processes may write at once: the last one wins, the other's files are hashed again. On a
    full disk nothing is remembered."""
    entries = {name: entry for name, entry in known.items() if Path(name).exists()}
    with contextlib.suppress(OSError), atomic_file(_path()) as temporary:
        temporary.write_text(json.dumps(entries, indent=0), encoding="utf-8")
