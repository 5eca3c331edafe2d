"""`quill top`, through the front door, with real servers."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quill.__main__ import main
from quill.server.auth.key_file import add_key
from quill.server.client.access import Access
from quill.server.client.sync_client import Client
from quill.server.client.tools.top import Board, Row, buckets, table
from tests.server.authority import Authority, write
from tests.server.process import COMMAND_LINE, reserved_port
from tests.server.running import NUM_BLOCKS, Running, running_server

Top = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def top(capsys: pytest.CaptureFixture[str]) -> Top:
    """Exit code, the table's lines, and what was said about errors."""

    def call(*arguments: str) -> tuple[int, list[str], str]:
        code = main(["top", "--once", "--interval", "0.01", *arguments])
        printed, said = capsys.readouterr()
        lines = printed.splitlines()
        return (
            code,
            lines[next(i for i, line in enumerate(lines) if line.startswith("server")) :],
            said,
        )

    return call


def metrics_of(running: Running) -> str:
    return f"127.0.0.1:{running.server.metrics_port}"


def test_all_servers_are_shown_and_a_dead_one_as_such(top: Top) -> None:
    with running_server(metrics_port=0) as one, running_server(http_port=0) as other:
        with Client(one.address) as client:
            client.generate("abc", max_new_tokens=5)
        http = f"127.0.0.1:{other.http_port}"
        code, lines, _ = top(metrics_of(one), http, "127.0.0.1:1")
        assert top(f"quill://{metrics_of(one)},{http}")[1][-1].startswith("all  ")
    assert code == 0
    _, first, second, dead, every = lines
    assert first.split()[:4] == [metrics_of(one), "serving", "0/4", "0"]
    assert second.split()[:4] == [http, "serving", "0/4", "0"]
    assert dead == f"{'127.0.0.1:1':{len(metrics_of(one))}}  down: nothing listens there"
    assert every.split()[:6] == ["all", "2", "of", "3", "serve", "0/8"]


def test_numbers_are_those_of_the_server() -> None:
    with running_server(metrics_port=0) as running:
        board = Board([metrics_of(running)], Access())
        board.scrape()
        with Client(running.address) as client:
            for _ in range(5):
                client.generate("abc", max_new_tokens=10)
        (row,) = board.scrape()
    assert row.window is not None
    assert row.window.now.value("quill_kv_blocks") == NUM_BLOCKS
    assert table([row])[1].split()[4] > "0.0"  # tokens/s
    first_token, gap = (
        buckets([row.window], f"quill_{name}_seconds")[float("inf")]
        for name in ("time_to_first_token", "inter_token_latency")
    )
    assert (first_token, gap) == (5, 5 * 9)


def test_a_server_that_comes_back_is_seen_again() -> None:
    with reserved_port() as port:
        with running_server(metrics_port=port) as running:
            address = metrics_of(running)
            board = Board([address], Access())
            with Client(running.address) as client:
                client.generate("abc", max_new_tokens=50)
            assert all(row.is_serving for row in board.scrape())
        assert board.scrape() == [Row(address, None, "down: nothing listens there")]
        with running_server(metrics_port=port):
            (row,) = board.scrape()
        assert row.window is not None
        assert table([row])[1].split()[4] == "0.0"  # tokens/s


def test_a_server_that_loads_does_not_serve(top: Top) -> None:
    with running_server(http_port=0, wait=False) as running:
        code, lines, said = top(f"127.0.0.1:{running.http_port}")
    assert code == 1
    assert "not serving" in lines[1]
    assert said == "quill: no server serves\n"


def test_tls_and_keys_are_those_of_every_command(top: Top, tmp_path: Path) -> None:
    authority = Authority("ours")
    tls, keys = write(tmp_path, authority.sign("server")), tmp_path / "keys.json"
    (tmp_path / "ca.pem").write_bytes(authority.cert)
    (tmp_path / "key").write_text(add_key(keys, "operator"))
    with running_server(metrics_port=0, tls=tls, api_keys=keys) as running:
        address, ca = metrics_of(running), ("--ca", str(tmp_path / "ca.pem"))
        key = ("--api-key-file", str(tmp_path / "key"))
        assert "serving" in top(address, *ca, *key)[1][1]
        assert "requires an API key" in top(address, *ca)[1][1]
        assert "TLS fails" in top(address, "--tls", *key)[1][1]
        assert "TLS without --ca?" in top(address)[1][1]
        named = f"quill+dns://localhost:{running.server.metrics_port}"
        assert any("serving" in line for line in top(named, *ca, *key)[1])


def test_what_is_no_server_is_said_in_words(top: Top) -> None:
    assert "has no address" in top("quill+dns://nobody.invalid:50051")[1][1]
    with running_server() as running:  # without metrics
        assert "no metrics there, nor at the next port" in top(running.address)[1][1]
    with pytest.raises(SystemExit):
        main(["top", "nowhere"])


def test_it_shows_again_and_again_until_one_leaves() -> None:
    with running_server(metrics_port=0) as running:
        ours, theirs = pty.openpty()
        command = [sys.executable, "-c", COMMAND_LINE, "top", metrics_of(running)]
        process = subprocess.Popen(
            [*command, "--interval", "0.05"], stdout=theirs, stderr=subprocess.PIPE
        )
        os.close(theirs)
        shown = b""
        while shown.count(b"Ctrl-C leaves") < 3:
            shown += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
        os.close(ours)
    assert (process.returncode, said) == (0, b"")
    assert shown.count(b"serving") >= 3
    assert shown.startswith(b"\x1b[?1049h")
