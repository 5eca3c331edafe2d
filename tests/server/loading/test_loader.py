"""No server starts without the library that chooses its tokens, and it says why."""

import subprocess
from typing import Any

import pytest

from quill.server.errors import StartError
from quill.server.loading import loader
from quill.server.loading.loader import require_operators
from quill.server.sampling import native


def pretend(monkeypatch: pytest.MonkeyPatch, problems: list[str | None], said: str) -> list[Any]:
    """What is found before and after compiling, and what that says."""
    commands: list[Any] = []

    def run(command: Any, **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", said)

    monkeypatch.setattr(loader, "operators_problem", lambda: problems.pop(0))
    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_what_is_there_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = pretend(monkeypatch, [None], "")
    require_operators()
    assert not commands


def test_what_is_missing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = pretend(monkeypatch, ["not built", None], "")
    require_operators()
    assert commands == [loader.BUILD_OPERATORS]


def test_what_cannot_be_compiled_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ["not built", "not built"], "no C++ compiler. Install one")
    with pytest.raises(StartError, match=r"not built.*no C\+\+ compiler. Install one"):
        require_operators()


def test_an_engine_without_the_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "operators_problem", lambda: "not built")
    native._library.cache_clear()
    try:
        with pytest.raises(StartError, match="tokens can't be chosen: not built"):
            native.prepare()
    finally:
        native._library.cache_clear()
