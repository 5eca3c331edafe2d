"""Temporary folders: those of killed processes go, those of others stay."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from quill.server.machine.private_folder import PrivateFolder

PROGRAM = """
import sys, tempfile
from quill.server.machine.private_folder import PrivateFolder
tempfile.tempdir = sys.argv[1]
folder = PrivateFolder("quill-test-")
(folder.path / "file").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_left_is_removed_and_what_others_use_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        used = Path(process.stdout.readline().strip())
        first = PrivateFolder("quill-test-")
        assert (used / "file").exists(), "its process runs"
        assert first.path.stat().st_mode & 0o777 == 0o700
        process.kill()
        process.wait()
        assert used.exists()
        second = PrivateFolder("quill-test-")
    assert set(tmp_path.iterdir()) == {first.path, second.path}
    first.remove()
    second.remove()
    assert not list(tmp_path.iterdir())
