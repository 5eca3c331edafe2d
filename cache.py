"""Where Quill keeps what it fetches and makes: wheels, models, checkpoints, bundles, peers' models.

Knows: the environment, locks between processes. Does not know: what lies there.
"""

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path


def cache_directory() -> Path:
    """$QUILL_CACHE, or a directory in the user's own cache."""
    return Path(os.environ.get("QUILL_CACHE") or "~/.cache/quill").expanduser().absolute()


@contextlib.contextmanager
def cache_lock(name: str) -> Iterator[None]:
    """One process at a time. The kernel releases the lock of a process that is killed."""
    path = cache_directory() / "locks" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Waiting: another process prepares {name}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
