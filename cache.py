"""Where Quill keeps what it fetches and makes: wheels, models, checkpoints, bundles, peers' models.

Knows: the environment, locks between processes, which version of the code made something.
Does not know: what lies there.
"""

import contextlib
import fcntl
import hashlib
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

_ROOT = Path(__file__).parent
_SHARED = ("cache.py", "json_records.py", "tokenizer_growth.py")  # which packages import


def cache_directory() -> Path:
    """$QUILL_CACHE, or a directory in the user's own cache."""
    return Path(os.environ.get("QUILL_CACHE") or "~/.cache/quill").expanduser().absolute()


@contextlib.contextmanager
def cache_lock(name: str) -> Iterator[None]:
    """One process at a time. The kernel releases the lock of a process that is killed."""
    with _lock_file(name) as file:
        if not _locks_at_once(file):
            print(f"Waiting: another process prepares {name}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def free_cache_lock(name: str) -> Iterator[bool]:
    """The same without waiting: whether no other process has the lock."""
    with _lock_file(name) as file:
        yield _locks_at_once(file)


def _lock_file(name: str) -> IO[str]:
    path = cache_directory() / "locks" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("w")


def _locks_at_once(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def code_hash(packages: Collection[str], without: Collection[str]) -> str:
    digest = hashlib.sha256()
    for path in code_of(packages, without):
        digest.update(f"{path}\0".encode() + (_ROOT / path).read_bytes())
    return digest.hexdigest()[:16]


def code_of(packages: Collection[str], without: Collection[str]) -> list[Path]:
    """Every module of some packages, relative to the root: a new one can't be forgotten. `without`:
    modules and folders that decide nothing."""
    modules = (path for package in packages for path in (_ROOT / package).rglob("*.py"))
    paths = (path.relative_to(_ROOT) for path in modules)
    left_out = set(map(Path, without))
    return sorted(
        (*map(Path, _SHARED), *(path for path in paths if not {path, *path.parents} & left_out))
    )
