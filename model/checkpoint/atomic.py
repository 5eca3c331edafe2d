"""Files and directories that are whole or absent, whatever ends the process.

Knows: temporary names, fsync, rename. Does not know: what is written.
"""

import contextlib
import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

AT_FDCWD = -100  # from Linux's fcntl.h: paths are as seen from the current directory
RENAME_EXCHANGE = 2


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yields a temporary directory beside `path`, and gives it the name `path` at the end.

    A directory that stands there already is replaced. When the block raises, nothing remains.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
    try:
        yield temporary
        for path_inside in (*temporary.rglob("*"), temporary):
            # Some writers make files private; a server may run as another user.
            path_inside.chmod(0o755 if path_inside.is_dir() else 0o644)
            _fsync(path_inside)
        _rename_over(temporary, path)
        _fsync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary name beside `path`, and gives that file the name `path` at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}.part"
    try:
        yield temporary
        _fsync(temporary)
        temporary.replace(path)
        _fsync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _rename_over(source: Path, target: Path) -> None:
    """Gives a directory the name of another, which goes away."""
    if not target.exists():
        source.rename(target)
        return
    _exchange(source, target)
    shutil.rmtree(source, ignore_errors=True)


def _exchange(one: Path, other: Path) -> None:
    """Two directories change names in one call, so that a kill finds both whole."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        names = (AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other))
        if libc.renameat2(*names, RENAME_EXCHANGE) == 0:
            return
    # Elsewhere than on Linux, and on file systems that can't: three calls, as near as it gets.
    aside = one.with_suffix(".old")
    other.rename(aside)
    one.rename(other)
    aside.rename(one)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
