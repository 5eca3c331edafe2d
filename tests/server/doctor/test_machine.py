"""What is said of a machine, and what isn't."""

import getpass
import json
import os
import socket
from pathlib import Path

import pytest

from quill.server.doctor.machine import Others, describe_machine, without_directories


def test_nobody_is_named() -> None:
    found = describe_machine()
    said = json.dumps(found)
    assert {"processor", "kernels", "cores", "memory", "CUDA", "compiler"} <= found.keys()
    assert str(Path.home()) + "/" not in said
    assert socket.gethostname() not in said
    assert f"/{getpass.getuser()}/" not in said


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/home/ann/.venv/lib/libcudart.so.13: not found", "libcudart.so.13: not found"),
        ("'/srv/models/b/manifest.json' is damaged", "'manifest.json' is damaged"),
        ("12 GB/s, 3/4 of it", "12 GB/s, 3/4 of it"),
    ],
)
def test_a_path_loses_its_directories(text: str, left: str) -> None:
    assert without_directories(text) == left


def test_cards_are_those_that_nvidia_smi_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = "NVIDIA L4, 23034 MiB, 580.65.06, 8.9"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n[ $# = 2 ] && echo '{shown}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert describe_machine()["cards"] == shown
    program.write_text("#!/bin/sh\necho no driver; exit 9\n")
    assert describe_machine()["cards"] == "none that nvidia-smi shows"


def test_own_work_isnt_that_of_others() -> None:
    others = Others()
    sum(range(3_000_000))
    assert 0 <= others.share() <= 1
