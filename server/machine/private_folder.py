"""A temporary folder that only this user can enter, and that doesn't outlive its process for long.

Knows: files, locks. Does not know: what the folder is for.

A process that is killed leaves its folder behind. Whoever makes the next one removes it: the lock
on a folder ends with its process, whichever container that was in.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class PrivateFolder:
    """Locked before anything is put into it. `prefix`: names all folders of this kind."""

    def __init__(self, prefix: str) -> None:
        _remove_left_behind(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_left_behind(prefix: str) -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another user's, or another process was quicker
            if any(path.iterdir()):  # an empty one may be new, and not locked yet
                lock = os.open(path, os.O_RDONLY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(lock)
