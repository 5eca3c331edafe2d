"""`quill cluster` before Ray starts: an error is one line, a printed command can be typed."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from quill.__main__ import build_parser, main
from quill.server.auth.key_file import add_key
from quill.server.cluster.commands import Signals, lines_to_type
from quill.server.cluster.local_ray import own_error
from quill.server.cluster.plan import read_plan
from tests.server.cluster.running_cluster import free_port
from tests.server.process import ROOT
from tests.server.tiny_bundle import TinyBundle


def test_errors_of_arguments(
    tiny_bundle: TinyBundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error_of(*words: str) -> str:
        assert main(["cluster", "up", str(tiny_bundle.directory), *words]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        return line

    keys, port = tmp_path / "keys.json", str(free_port())
    assert "`quill keys add` makes one" in error_of("--port", port, "--api-keys", str(keys))
    keys.write_text("{")
    assert "isn't JSON" in error_of("--port", port, "--api-keys", str(keys))
    assert "this machine's" in error_of("--host", "nowhere.invalid", "--insecure")
    assert "doesn't encrypt" in error_of("--host", "0.0.0.0")
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = str(other.getsockname()[1])
        assert "Give another --port" in error_of("--port", taken)


@pytest.mark.parametrize(
    ("words", "with_key"),
    [
        ([], [False, False]),
        (["--api-keys", "keys.json"], [True, True]),
        (["--api-keys", "keys.json", "--allow-unauthenticated", "metrics"], [True, False]),
    ],
)
def test_printed_commands_have_a_key_where_it_is_needed(
    words: list[str],
    with_key: list[bool],
    tiny_bundle: TinyBundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    add_key(tmp_path / "keys.json", "alice")
    command = ["cluster", "up", str(tiny_bundle.directory), "--port", str(free_port()), *words]
    plan = read_plan(build_parser().parse_args(command), threads=1, one_machine=True)
    assert ["--api-key-file" in line for line in lines_to_type(plan)] == with_key


def run(*command: str, **environment: str) -> tuple[int, str]:
    given = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=given, check=False
    )
    return done.returncode, done.stderr


def test_reload_without_a_cluster(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="there is no Ray here: `make test-cluster` installs it")
    command = ("-m", "quill", "cluster", "reload")
    code, line = run(*command, RAY_ADDRESS="", RAY_TMPDIR=str(tmp_path))
    assert (code, line.count("\n")) == (1, 1)
    assert "run it on one of its machines" in line


def test_without_ray_the_error_names_the_extra_and_no_file_is_left(
    tiny_bundle: TinyBundle, tmp_path: Path
) -> None:
    without = "import sys; sys.modules['ray'] = None; import quill.__main__ as q; exit(q.main())"
    words = ("cluster", "up", str(tiny_bundle.directory), "--port", str(free_port()))
    code, text = run("-c", without, *words, TMPDIR=str(tmp_path))
    assert code == 3
    assert "pip install '.[cluster]'" in text
    assert list(tmp_path.glob("quill-*")) == []


def test_error_of_a_replica_is_found_in_the_message_of_ray() -> None:
    message = (
        "The deployment failed to start 3 times in a row. Error:\nray::ServeReplica…\n"
        '  File "replica.py", line 1, in load\n'
        "quill.server.errors.StartError: --context is too much\n"
    )
    assert own_error(message) == "--context is too much"
    assert own_error("Out of memory.") == "Out of memory."


@pytest.fixture
def signals() -> Iterator[Signals]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    signals = Signals()
    signals.listen()
    yield signals
    for number, handler in before.items():
        signal.signal(number, handler)


def test_first_signal_stops_and_the_second_aborts_and_sighup_reloads_once(signals: Signals) -> None:
    assert not signals.wait_for_stop(1, 0.0)
    signal.raise_signal(signal.SIGHUP)
    assert not signals.wait_for_stop(1, 60.0)
    assert (signals.take_reload(), signals.take_reload()) == (True, False)
    signal.raise_signal(signal.SIGTERM)
    assert signals.wait_for_stop(1, 60.0)
    assert not signals.wait_for_stop(2, 0.0)
    signal.raise_signal(signal.SIGINT)
    assert signals.wait_for_stop(2, 60.0)


@pytest.mark.timeout(60)
def test_signals_at_any_line_of_the_waiting_block_nothing(signals: Signals) -> None:
    """In the thread that waits, as Python runs handlers. An Event waited for its own lock."""
    before, seen = sys.gettrace(), set[tuple[CodeType, int]]()

    def interrupt(frame: FrameType, *_: object) -> Any:
        if (line := (frame.f_code, frame.f_lineno)) not in seen:
            seen.add(line)
            signal.raise_signal(signal.SIGINT)
        return interrupt

    sys.settrace(interrupt)
    try:
        stopped = signals.wait_for_stop(2, 60.0)
    finally:
        sys.settrace(before)
    assert stopped
    signals.wait_for_stop(1, 0.0)
    assert signals.num_stops == len(seen)
