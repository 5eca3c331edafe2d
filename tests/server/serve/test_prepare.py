"""From what `quill serve` is given to a bundle, by processes of their own."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quill.__main__ import build_parser
from quill.model.errors import SourceError
from quill.server.errors import StartError
from quill.server.loading import choices
from quill.server.serve import prepare, run
from quill.server.serve.prepare import prepared_bundle


def test_a_bundle_is_served_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    assert prepared_bundle(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("precision", ["int8", "quill4,int8"])
def test_a_precision_that_nobody_knows_is_refused_before_anything_is_made(precision: str) -> None:
    with pytest.raises(StartError, match="unknown precision 'int8'; there are fp32, "):
        prepared_bundle(None, precision=precision)


def test_a_source_that_is_not_there_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(SourceError, match="Then write hf:org/name"):
        prepared_bundle("org/name")


def test_a_port_that_is_taken_is_refused_before_a_model_is_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "prepared_bundle", None)
    monkeypatch.setattr(run, "set_up_logging", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        args = build_parser().parse_args(["serve", "--port", port])
        with pytest.raises(StartError, match=f"can't listen at 127.0.0.1:{port}: .*another --port"):
            run.run(args)


class RanError(Exception):
    """Stands for the process that takes this one's place."""


@pytest.mark.parametrize(
    ("asked", "has_cuda", "code", "ran"),
    [
        (("cpu", ""), True, 0, [[]]),
        (("auto", ""), False, 0, [[]]),
        (("auto", ""), True, 0, [["--precision", "fp16"]]),
        (("auto", ""), True, 2, [["--precision", "fp16"], []]),  # an encoder has no such graphs
        (("cuda", ""), True, 2, [["--precision", "fp16"]]),
        (("auto", "quill8"), True, 0, [["--precision", "quill8"]]),
    ],
)
def test_cuda_takes_halves_where_a_model_has_them(
    monkeypatch: pytest.MonkeyPatch,
    asked: tuple[str, str],
    has_cuda: bool,
    code: int,
    ran: list[list[str]],
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        commands.append(command)
        return subprocess.CompletedProcess(command, code)

    def become(_: str, command: list[str]) -> None:
        commands.append(command)
        raise RanError

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(os, "execv", become)
    monkeypatch.setattr(choices, "cuda_problem", lambda: None if has_cuda else "no card")
    monkeypatch.setattr(sys, "argv", ["prepare", "model.gguf", *asked])
    with pytest.raises((RanError, SystemExit)):
        prepare.main()
    export = [sys.executable, "-m", "quill", "export", "model.gguf"]
    assert commands == [[*export, *options] for options in ran]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("auto", "fp16"), "CUDA can't be used: no card"),
        (("cuda", ""), "CUDA can't be used: no card"),
        (("cuda", "quill4"), "CUDA can't be used: quill4 is for the CPU"),
        (("cpu", "quill4,fp16"), "--precision fp16 is for CUDA"),
    ],
)
def test_what_no_bundle_could_run_on_is_refused_before_an_export(
    monkeypatch: pytest.MonkeyPatch, asked: tuple[str, str], words: str
) -> None:
    for module, name in ((subprocess, "run"), (os, "execv")):
        monkeypatch.setattr(module, name, None)
    monkeypatch.setattr(choices, "cuda_problem", lambda: "no card")
    monkeypatch.setattr(sys, "argv", ["prepare", "model.gguf", *asked])
    with pytest.raises(SystemExit, match=f"quill: {words}"):
        prepare.main()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_ends_the_start_ends_the_export_too(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    class Child:
        """Never ends by itself."""

        ended = False

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def __enter__(self) -> "Child":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def communicate(self) -> None:
            signal.raise_signal(number)

        def terminate(self) -> None:
            Child.ended = True

    monkeypatch.setattr(subprocess, "Popen", Child)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            prepared_bundle("smollm2-135m", "cpu")
    finally:
        signal.signal(signal.SIGINT, before)
    assert Child.ended
