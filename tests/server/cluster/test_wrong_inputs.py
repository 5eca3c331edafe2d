"""Errors of arguments are one line, printed before Ray starts."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from quill.__main__ import build_parser
from quill.server.auth.key_file import add_key
from quill.server.cluster.commands import is_free, lines_to_type
from quill.server.cluster.local_ray import own_error
from quill.server.cluster.plan import read_plan
from tests.server.cluster.running_cluster import free_port
from tests.server.process import ROOT
from tests.server.tiny_bundle import TinyBundle

pytest.importorskip("ray", reason="there is no Ray here: `make test-cluster` installs it")


def error_of(*words: str, **environment: str) -> str:
    """All that `quill cluster` prints."""
    ended = subprocess.run(
        [sys.executable, "-m", "quill", "cluster", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        check=False,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    (line,) = ended.stderr.splitlines()
    return line


def test_keys_that_cannot_be_read_are_error_of(tiny_bundle: TinyBundle, tmp_path: Path) -> None:
    up = ("up", str(tiny_bundle.directory), "--port", str(free_port()), "--api-keys")
    file = tmp_path / "keys.json"
    assert "`quill keys add` makes one" in error_of(*up, str(file))
    file.write_text("{")
    assert "isn't JSON" in error_of(*up, str(file))


def test_port_that_is_taken_is_error_of(tiny_bundle: TinyBundle) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert not is_free("127.0.0.1", port)
        assert "Give another --port" in error_of(
            "up", str(tiny_bundle.directory), "--port", str(port)
        )
    assert is_free("127.0.0.1", port)


def test_host_that_is_not_this_machines_is_error_of(tiny_bundle: TinyBundle) -> None:
    line = error_of("up", str(tiny_bundle.directory), "--host", "nowhere.invalid", "--insecure")
    assert "this machine's" in line


def testlines_to_type_have_the_key_where_it_is_wanted(
    tiny_bundle: TinyBundle, tmp_path: Path
) -> None:
    add_key(tmp_path / "keys.json", "alice")
    words = ("up", str(tiny_bundle.directory), "--port", str(free_port()), "--replicas", "2")

    def lines(*more: str) -> list[str]:
        args = build_parser().parse_args(["cluster", *words, *more])
        return lines_to_type(read_plan(args, threads=1, one_machine=True))

    keys = ("--api-keys", str(tmp_path / "keys.json"))
    assert ["--api-key-file" in line for line in lines()] == [False, False]
    assert ["--api-key-file" in line for line in lines(*keys)] == [True, True]
    assert [
        "--api-key-file" in line for line in lines(*keys, "--allow-unauthenticated", "metrics")
    ] == [True, False]


def test_reload_without_a_cluster(tmp_path: Path) -> None:
    line = error_of("reload", RAY_ADDRESS="", RAY_TMPDIR=str(tmp_path))
    assert "run it on one of its machines" in line


def test_error_of_a_replica_is_found_in_the_message_of_ray() -> None:
    message = (
        "The deployment failed to start 3 times in a row. Error:\nray::ServeReplica…\n"
        '  File "replica.py", line 1, in load\n'
        "quill.server.errors.StartError: --context is too much\n"
    )
    assert own_error(message) == "--context is too much"
    assert own_error("Out of memory.") == "Out of memory."


def test_without_ray_the_error_names_the_extra_and_no_file_is_left(
    tiny_bundle: TinyBundle, tmp_path: Path
) -> None:
    without = "import sys; sys.modules['ray'] = None; import quill.__main__ as q; exit(q.main())"
    command = [sys.executable, "-c", without, "cluster", "up", str(tiny_bundle.directory)]
    ended = subprocess.run(
        [*command, "--port", str(free_port())],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=False,
    )
    assert ended.returncode == 3
    assert "pip install '.[cluster]'" in ended.stderr
    assert list(tmp_path.glob("quill-*")) == []
