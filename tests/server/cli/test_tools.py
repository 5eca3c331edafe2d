"""`quill chat --tools FILE.py`: functions become tools, and run only after a yes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quill.__main__ import main
from quill.server.cli.chat import MAX_ROUNDS
from quill.server.cli.local_tools import load_tools
from quill.server.errors import ServerError
from tests.server.parrot import Parrot, make_parrot
from tests.server.running import TEMPLATE, Running, running_server

SOURCE = '''
"""Tools to try."""
from __future__ import annotations

from pathlib import Path
from typing import Literal, Optional


def add(a: int, b: float = 0.5) -> str:
    """Adds two numbers.

    Slowly.
    """
    Path(__file__).with_name("ran").touch()
    return f"say it is {a + b}"


def find(
    words: list[str],
    where: Literal["here", "there"],
    limit: Optional[int] = None,
    *,
    options: dict[str, bool | str] = {},
    rest: list = [],
) -> dict:
    return {"words": words, "where": where}


def fail() -> None:
    raise RuntimeError("no such\x1b[2Jluck")


def _hidden(x):
    pass
'''


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    path = tmp_path / "tools.py"
    path.write_text(SOURCE)
    return path


def test_functions_become_tools(tools: Path) -> None:
    found = load_tools(str(tools))
    assert list(found) == ["add", "find", "fail"]
    assert found["add"].json == {
        "name": "add",
        "description": "Adds two numbers.\n\nSlowly.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "number"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    }
    properties = found["find"].parameters["properties"]
    assert properties == {
        "words": {"type": "array", "items": {"type": "string"}},
        "where": {"enum": ["here", "there"]},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "options": {
            "type": "object",
            "additionalProperties": {"anyOf": [{"type": "boolean"}, {"type": "string"}]},
        },
        "rest": {"type": "array"},
    }
    assert found["find"].run('{"words": ["ü"], "where": "here"}') == (
        '{"words": ["\\u00fc"], "where": "here"}'
    )
    assert found["fail"].run("{}").startswith("RuntimeError: no such")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1", "has no public function"),
        ("def f(x): pass", "has no type hint for x"),
        ("def f(x: set): pass", "x of f() has the type"),
        ("def f(x: Nobody): pass", "can't be imported: NameError"),
        ("def f(x: 'Nobody'): pass", "a type hint that fails"),
        ("def f(*x: int): pass", "each needs its own name"),
        ("async def f(): pass", "is async"),
        ("1 / 0", "can't be imported: ZeroDivisionError"),
        ("def", "can't be imported: SyntaxError"),
        ("import sys; sys.exit(3)", "can't be imported: SystemExit: 3"),
        ("def f(x: '1+'): pass", "a type hint that fails"),
        ("from typing import Literal\ndef f(x: Literal[b'x']): pass", "x of f() has the type"),
        ("from typing import Literal\ndef f(x: Literal[[1]]): pass", "x of f() has the type"),
        ("f = lambda: 1", "has no public function"),
    ],
)
def test_files_that_are_no_tools_are_refused(tmp_path: Path, source: str, said: str) -> None:
    path = tmp_path / "tools.py"
    path.write_text(source)
    with pytest.raises(ServerError) as raised:
        load_tools(str(path))
    assert said in str(raised.value)


def test_a_file_is_imported_as_any_module_is(tmp_path: Path) -> None:
    """Dataclasses look for the module that they are in."""
    path = tmp_path / "tools.py"
    path.write_text(
        "from __future__ import annotations\nimport sys, typing\n"
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Found:\n    name: str\n"
        "def find(words: typing.List, options: typing.Dict) -> str:\n    return Found('x').name\n"
        "def leave() -> None:\n    sys.exit(3)\n"
    )
    found = load_tools(str(path))
    assert found["find"].parameters["properties"] == {
        "words": {"type": "array"},
        "options": {"type": "object"},
    }
    assert found["find"].run('{"words": [], "options": {}}') == "x"
    assert found["leave"].run("{}") == "SystemExit: 3"


def test_file_must_be_there(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.py"):
        with pytest.raises(ServerError, match="isn't a Python file"):
            load_tools(str(path))


@pytest.fixture(scope="module")
def knowing() -> Iterator[Running]:
    with running_server(served=make_parrot(), session=Parrot()) as server:
        yield server


Chat = Callable[..., str]


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """What is printed after the user has typed these lines."""

    def run(server: Running, tools: Path, *lines: str) -> str:
        remaining = iter(lines)

        def answer(question: str) -> str:
            print(question, end="")
            line = next(remaining, None)
            if line is None:
                raise EOFError
            return line

        monkeypatch.setattr("builtins.input", answer)
        arguments = ["--address", server.address, "--timeout", "30", "--tools", str(tools)]
        assert main(["chat", *arguments]) == 0
        return capsys.readouterr().out

    return run


ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 4, "b": 38}}\n</tool_call>'


def test_tool_call_runs_after_a_yes(chat: Chat, knowing: Running, tools: Path) -> None:
    printed = chat(knowing, tools, f"say {ADD}", "y")
    assert 'add({"a": 4, "b": 38})\nRun it? [y/N] say it is 42\nit is 42\n' in printed
    assert tools.with_name("ran").exists()


@pytest.mark.parametrize("answer", ["", "n", "no", "yess", "maybe"])
def test_nothing_runs_without_a_yes(chat: Chat, knowing: Running, tools: Path, answer: str) -> None:
    # The model calls again and again, until the turn ends.
    answers = [answer] * MAX_ROUNDS
    printed = chat(knowing, tools, f"say {ADD}", *answers, "say well")
    assert printed.count("Run it?") == MAX_ROUNDS
    assert "42" not in printed
    assert "> well\n" in printed
    assert not tools.with_name("ran").exists()


def test_incomplete_tool_call_is_not_run(chat: Chat, knowing: Running, tools: Path) -> None:
    long = ADD.replace("38", "3" * 400)
    printed = chat(knowing, tools, f"say {long}", "y")
    assert "[the tool call is incomplete]" in printed
    assert "Run it?" not in printed


def test_template_without_tools_calls_after_the_command(chat: Chat, tmp_path: Path) -> None:
    tools = tmp_path / "tools.py"
    tools.write_text('def fail() -> None:\n    raise RuntimeError("no \\x1b[2Jluck")')
    with running_server(served=make_parrot(TEMPLATE)) as server:
        printed = chat(server, tools, "hi", "/call do it", "y")
    assert "it calls them only after /call TEXT" in printed
    assert printed.count("fail({})\nRun it? [y/N] RuntimeError: no \\u001b[2Jluck\n") == 1
