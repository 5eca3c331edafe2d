"""What a server says when it is ready: the line can be typed as it is, beside the named files."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from quill.__main__ import main
from quill.server.auth.key_file import add_key
from quill.server.serve.server import http_url, line_to_type
from quill.server.settings import Settings
from tests.server.authority import Authority, write
from tests.server.running import running_server

OURS, THEIRS = Authority("ours"), Authority("theirs")


def protection(directory: Path, mutual: bool, keys: bool) -> dict[str, Any]:
    """The server's settings; what the client needs is in the directory, by the line's names."""
    friend, settings = THEIRS.sign("friend"), dict[str, Any]()
    client_ca = THEIRS.cert if mutual else None
    settings["tls"] = write(directory, OURS.sign("server"), client_ca=client_ca)
    (directory / "CA.pem").write_bytes(OURS.cert)
    (directory / "CLIENT.pem").write_bytes(friend.cert)
    (directory / "CLIENT.key").write_bytes(friend.key)
    if keys:
        settings["api_keys"] = directory / "keys.json"
        (directory / "FILE").write_text(add_key(settings["api_keys"], "alice"))
    return settings


def printed_line(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return shlex.split(capsys.readouterr().out.splitlines()[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize(
    ("mutual", "keys"), [(False, False), (False, True), (True, False), (True, True)]
)
def test_printed_line_gets_an_answer(
    host: str,
    mutual: bool,
    keys: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with running_server(host=host, **protection(tmp_path, mutual, keys)) as running:
        command, *arguments = printed_line(capsys)
        assert command == "quill"
        assert arguments[2] == f"127.0.0.1:{running.server.port}"
        assert ("--cert" in arguments, "--api-key-file" in arguments) == (mutual, keys)
        assert main([*arguments, "--max-new-tokens", "2"]) == 0


def test_server_on_all_of_ipv6_is_called_on_its_loopback() -> None:
    assert "--address '[::1]:5' " in line_to_type(Settings(host="::"), 5, "causal")


@pytest.mark.parametrize(("host", "found"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]")])
def test_metrics_of_a_server_on_all_addresses_are_where_they_can_be_read(
    host: str, found: str
) -> None:
    assert http_url(Settings(host=host), 5, "/metrics") == f"http://{found}:5/metrics"
