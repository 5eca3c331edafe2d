"""The bundle that is served when none is named."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from quill.export.bundle.manifest import write_manifest
from quill.server.errors import StartError
from quill.server.loading import choices
from quill.server.serve.default_model import default_bundle
from tests.export.bundle.test_manifest import make_bundle


class Commands:
    """Stands for the exporter, which takes a minute."""

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


@pytest.fixture(autouse=True)
def fast_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has."""
    monkeypatch.setattr(choices, "operators_problem", lambda: None)
    monkeypatch.setattr(choices, "operators_are_fast", lambda: True)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    commands = Commands(0)
    monkeypatch.setattr(subprocess, "run", commands.run)
    return commands


def cached_bundle(cache: Path, precision: str = "quill4", **changes: Any) -> Path:
    bundle = cache / "bundles" / "smollm2-135m"
    bundle.parent.mkdir()
    manifest = make_bundle(bundle)
    graphs = replace(manifest.graphs[0], precision=precision)  # type: ignore[arg-type]
    changes = {"onnxruntime": onnxruntime.__version__, "graphs": (graphs,)} | changes
    write_manifest(bundle, replace(manifest, **changes))
    return bundle


def export_of(bundle: Path, *options: str) -> list[str]:
    quill = [sys.executable, "-m", "quill"]
    return [*quill, "export", "smollm2-135m", "--out", str(bundle), *options]


ADD = "--add"
TRIED = {"left_out": ("quill4",)}  # and wasn't good enough: it isn't tried again


@pytest.mark.parametrize(
    ("cached", "changes", "asked", "options"),
    [
        (None, {}, ("cpu", None), []),
        (None, {}, ("cpu", "fp32"), ["--precision", "fp32"]),
        (None, {}, ("cuda", None), ["--precision", "fp16"]),
        ("quill4", {}, ("auto", None), None),
        ("quill4", {}, ("cpu", "fp32"), ["--precision", "fp32", ADD]),
        ("fp32", {}, ("cpu", None), [ADD]),
        ("quill8", TRIED, ("cpu", None), None),
    ],
)
def test_what_is_asked_for_and_is_not_in_the_cache_is_made(
    cache: Path,
    commands: Commands,
    cached: str | None,
    changes: dict[str, Any],
    asked: tuple[str, str | None],
    options: list[str] | None,
) -> None:
    """`options`: of the export; None: nothing is made."""
    bundle = cache / "bundles" / "smollm2-135m"
    if cached is not None:
        cached_bundle(cache, cached, **changes)
    assert default_bundle(*asked) == bundle
    assert commands.ran == ([] if options is None else [export_of(bundle, *options)])


@pytest.mark.parametrize(
    "outdated", ['"format_version": 0', '"onnxruntime": "1.0"', '"precision": "int8"']
)
def test_bundle_of_another_version_is_made_anew(
    cache: Path, commands: Commands, outdated: str
) -> None:
    bundle = cached_bundle(cache)
    path = bundle / "manifest.json"
    entry = outdated.partition(":")[0]
    text = re.sub(f"{entry}: [^,]+", outdated, path.read_text("utf-8"))
    path.write_text(text, "utf-8")
    default_bundle()
    assert commands.ran == [export_of(bundle)]


def test_first_start_exports_in_a_process_of_its_own(cache: Path, commands: Commands) -> None:
    assert default_bundle() == cache / "bundles" / "smollm2-135m"
    assert commands.ran == [export_of(default_bundle())] * 2


@pytest.mark.parametrize("precision", [None, "quill8"])
def test_bundle_that_cannot_be_added_to_is_served_as_it_is_unless_more_was_asked(
    cache: Path, commands: Commands, precision: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = cached_bundle(cache, "fp32")
    commands.exit_code = 1
    if precision is None:
        assert default_bundle("cpu", precision) == bundle
        assert "So it is served as it is" in capsys.readouterr().out
    else:
        with pytest.raises(StartError, match="--precision quill8 --add` failed with code 1"):
            default_bundle("cpu", precision)


def test_export_that_fails_ends_the_start(cache: Path, commands: Commands) -> None:
    commands.exit_code = 1
    with pytest.raises(StartError, match=r"export smollm2-135m .*` failed with code 1"):
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


def test_a_precision_that_nobody_knows_is_refused_before_anything_is_made() -> None:
    with pytest.raises(StartError, match="unknown precision 'int8'; there are fp32, "):
        default_bundle(precision="int8")
