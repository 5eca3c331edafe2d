"""What is wrong is said in one line, before Ray is started."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from quill.server.cluster.environment import free_port, is_free
from quill.server.cluster.local_ray import _own_words
from tests.server.process import ROOT
from tests.server.tiny_bundle import TinyBundle

pytest.importorskip("ray", reason="there is no Ray here: `make test-cluster` installs it")


def told(*words: str, **environment: str) -> str:
    """All that `quill cluster` says."""
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


def test_keys_that_cannot_be_read_are_told(tiny_bundle: TinyBundle, tmp_path: Path) -> None:
    up = ("up", str(tiny_bundle.directory), "--port", str(free_port()), "--api-keys")
    file = tmp_path / "keys.json"
    assert "`quill keys add` makes one" in told(*up, str(file))
    file.write_text("{")
    assert "isn't JSON" in told(*up, str(file))


def test_port_that_is_taken_is_told(tiny_bundle: TinyBundle) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert not is_free("127.0.0.1", port)
        assert "Give another --port" in told("up", str(tiny_bundle.directory), "--port", str(port))
    assert is_free("127.0.0.1", port)


def test_reload_without_a_cluster_says_where_to_run_it(tmp_path: Path) -> None:
    line = told("reload", RAY_ADDRESS="", RAY_TMPDIR=str(tmp_path))
    assert "run it on one of its machines" in line


def test_words_of_a_replica_are_found_in_what_ray_makes_of_them() -> None:
    message = (
        "The deployment failed to start 3 times in a row. Error:\nray::ServeReplica…\n"
        '  File "replica.py", line 1, in load\n'
        "quill.server.errors.StartError: --context is too much\n"
    )
    assert _own_words(message) == "--context is too much"
    assert _own_words("Out of memory.") == "Out of memory."


def test_without_ray_its_extra_is_named_and_nothing_is_left(
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
