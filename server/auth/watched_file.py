"""Files that may change while the server runs: certificates, keys.

Knows: when a file was replaced, what to do with a bad one. Does not know: what is in it.

Nobody is told of a change; whoever needs the content asks, and asking costs a stat. A change that
can't be read is logged once and the last good content stays: half of an update, such as a new
certificate beside its old key, must not take a server down.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from quill.server.errors import ServerError

logger = logging.getLogger(__name__)

_Content = TypeVar("_Content")
_Stamp = tuple[int, int, int, int]


class Watched(Generic[_Content]):
    """The newest good content of some files. May be asked from any thread."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], _Content]) -> None:
        """Raises what `read` raises, if the files can't be read to begin with."""
        self._paths = paths
        self._read = read
        self._lock = threading.Lock()
        self._seen = self._stamps()
        self._content = read()

    def get(self) -> _Content:
        with self._lock:
            self._update()
            return self._content

    def changed(self) -> _Content | None:
        """The content if it is another one than the last time; else None."""
        with self._lock:
            return self._content if self._update() else None

    def _update(self) -> bool:
        stamps = self._stamps()
        if stamps == self._seen:
            return False
        names = ", ".join(map(str, self._paths))
        try:
            content = self._read()
            if self._stamps() != stamps:
                return False  # it changed while it was read; the next to ask reads again
        except (OSError, ServerError) as error:
            self._seen = stamps
            logger.error("%s changed and can't be used; the last good one stays: %s", names, error)
            return False
        self._seen, self._content = stamps, content
        logger.info("%s changed and was read again", names)
        return True

    def _stamps(self) -> list[_Stamp | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> _Stamp | None:
    """None: it isn't there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
