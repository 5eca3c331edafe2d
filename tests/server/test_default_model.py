"""The bundle that is served when none is named."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from server.default_model import default_bundle
from server.errors import StartError
from tests.export.test_manifest import make_bundle


class Commands:
    """Stands for the importer and the exporter, which take minutes."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self.ran: list[list[str]] = []

    def run(self, command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        self.ran.append(command)
        return subprocess.CompletedProcess(command, self.exit_code)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUILL_CACHE", str(tmp_path))
    return tmp_path


def test_bundle_in_the_cache_is_used_as_it_is(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = cached_bundle(cache)
    commands = Commands(0)
    monkeypatch.setattr(subprocess, "run", commands.run)
    assert default_bundle() == bundle
    assert not commands.ran


@pytest.mark.parametrize("outdated", ['"format_version": 0', '"onnxruntime": "1.0"'])
def test_bundle_of_another_version_is_made_anew(
    cache: Path, monkeypatch: pytest.MonkeyPatch, outdated: str
) -> None:
    path = cached_bundle(cache) / "manifest.json"
    entry = outdated.partition(":")[0]
    text = re.sub(f"{entry}: [^,]+", outdated, path.read_text("utf-8"))
    path.write_text(text, "utf-8")
    commands = Commands(0)
    monkeypatch.setattr(subprocess, "run", commands.run)
    default_bundle()
    assert [command[3] for command in commands.ran] == ["import", "export"]


def cached_bundle(cache: Path) -> Path:
    bundle = cache / "bundles" / "smollm2-135m"
    bundle.parent.mkdir()
    make_bundle(bundle)
    return bundle


def test_first_start_imports_and_exports_in_processes_of_their_own(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = Commands(0)
    monkeypatch.setattr(subprocess, "run", commands.run)
    bundle, checkpoint = default_bundle(), cache / "checkpoints" / "smollm2-135m"
    quill = [sys.executable, "-m", "quill"]
    assert commands.ran == [
        [*quill, "import", "smollm2-135m"],
        [*quill, "export", str(checkpoint), "--out", str(bundle)],
    ]


def test_import_that_fails_ends_the_start(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Commands(1)
    monkeypatch.setattr(subprocess, "run", commands.run)
    with pytest.raises(StartError, match="import smollm2-135m` failed with code 1"):
        default_bundle()
    assert len(commands.ran) == 1


@pytest.mark.usefixtures("cache")
def test_signal_during_the_first_start_ends_the_child_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()  # the handler raises here at the latest

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit) as caught:
        default_bundle()
    assert caught.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
