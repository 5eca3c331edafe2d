"""Every command that writes, on a disk that is really full: one clear line, and the old stays.

The disk is a small file system in memory that only one process sees.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.good_files import NAMES, write_good_files

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 300.0
UNSHARE = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
MOUNT = 'mount -t tmpfs -o size=2m none "$1" && shift && exec "$@"'
# Each command as [room, words...]: so many bytes are free when it begins. Says what came of it.
RUN = """
import contextlib, hashlib, io, json, os, pathlib, shutil, sys
from quill.__main__ import main

good, disk = map(pathlib.Path, sys.argv[1:3])
junk = disk / "junk"
os.environ |= {"QUILL_CACHE": str(disk / "cache"), "PIP_NO_INDEX": "1"}
for name in ("bundle", "checkpoint"):
    shutil.copytree(good / name, disk / name)
(disk / "cache").mkdir()


def fill(room):
    with contextlib.suppress(OSError), junk.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    os.truncate(junk, junk.stat().st_size - room)


def look():
    # All but what the cache keeps for the next command: hashes of files that were read, and locks.
    kept = {disk / "cache" / name for name in ("hashes.json", "locks")}
    files = [path for path in sorted(disk.rglob("*")) if not kept & {path, *path.parents}]
    files = [path for path in files if path.is_file()]
    return [(str(path), hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]


for room, *words in json.loads(sys.argv[3]):
    fill(room)
    before = look()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(words)
    print(json.dumps([code, said.getvalue(), look() == before]))
"""


class Outcome(NamedTuple):
    code: int
    said: str
    is_as_before: bool  # every file that is there


def can_mount(directory: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    command = [*UNSHARE, "sh", "-c", MOUNT, "sh", str(directory), "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def run_on_full_disk(good: Path, disk: Path, commands: list[list[str | int]]) -> list[Outcome]:
    program = [sys.executable, "-c", RUN, str(good), str(disk), json.dumps(commands)]
    done = subprocess.run(
        [*UNSHARE, "sh", "-c", MOUNT, "sh", str(disk), *program],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return [Outcome(*json.loads(line)) for line in done.stdout.splitlines() if line[:1] == "["]


def test_full_disk_is_said_in_one_line_and_what_stood_there_stays(tmp_path: Path) -> None:
    good, disk = tmp_path / "good", tmp_path / "disk"
    good.mkdir()
    disk.mkdir()
    if not can_mount(disk):
        pytest.skip("this system lets nobody mount a file system of its own")
    write_good_files(good)
    _, checkpoint, gguf = (str(good / name) for name in NAMES)
    bundle = ["--out", str(disk / "bundle"), "--no-verify", "--precision", "fp32"]
    some = 40_960  # enough to begin a file
    commands: list[list[str | int]] = [
        [some, "export", checkpoint, *bundle],
        [some, "import", gguf, "--out", str(disk / "checkpoint"), "--force"],
        [0, "import", "smollm2-135m"],
        [0, "keys", "add", str(disk / "keys.json"), "alice"],
    ]
    outcomes = run_on_full_disk(good, disk, commands)
    reasons = ("the disk is full", "No space left", "0.0 GB free", "No space left")
    for command, outcome, reason in zip(commands, outcomes, reasons, strict=True):
        last = outcome.said.splitlines()[-1]
        assert (outcome.code, outcome.is_as_before) == (1, True), (command, outcome)
        assert last.startswith("quill: "), (command, outcome)
        assert reason in last, (command, outcome)
        assert "Traceback" not in outcome.said
