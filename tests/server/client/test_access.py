"""What a client may prove itself with, and where a server may be reached."""

import argparse
from pathlib import Path

import pytest

from quill.__main__ import build_parser, main
from quill.server.client.access import Access, AccessError, read_access


def test_certificate_and_key_come_together() -> None:
    with pytest.raises(AccessError, match="give both"):
        Access(cert=b"cert")
    with pytest.raises(AccessError, match="give both"):
        Access(key=b"key")


def test_api_key_is_never_sent_to_another_machine_in_the_clear() -> None:
    with pytest.raises(AccessError, match="the API key could be read"):
        Access(api_key="secret").credentials("example.org:1")
    assert Access(api_key="secret").credentials("127.0.0.1:1") is None
    assert Access(api_key="secret", insecure=True).credentials("example.org:1") is None
    assert Access(api_key="secret", tls=True).credentials("example.org:1") is not None


def test_api_key_never_shows_in_a_representation() -> None:
    assert "secret" not in repr(Access(api_key="secret", cert=b"cert", key=b"secret"))


def _args(**given: object) -> argparse.Namespace:
    unset = {"tls": False, "ca": None, "cert": None, "key": None, "api_key_file": None}
    return argparse.Namespace(**{**unset, "insecure": False, **given})


def test_api_key_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUILL_API_KEY", raising=False)
    assert read_access(_args()).metadata == ()
    monkeypatch.setenv("QUILL_API_KEY", "from-the-environment")
    (tmp_path / "key").write_text("from-a-file\n")
    assert read_access(_args()).api_key == "from-the-environment"
    assert read_access(_args(api_key_file=tmp_path / "key")).api_key == "from-a-file"


@pytest.mark.parametrize("content", ["", "two words", "two\nlines", "ключ"])
def test_file_that_holds_no_key_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(content, encoding="utf-8")
    with pytest.raises(AccessError, match="right file"):
        read_access(_args(api_key_file=tmp_path / "key"))
    with pytest.raises(AccessError, match="can't read"):
        read_access(_args(api_key_file=tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("localhost", "'localhost' isn't HOST:PORT, such as"),
        ("localhost:", "isn't HOST:PORT, such as"),
        (":50051", "isn't HOST:PORT, such as"),
        ("http://127.0.0.1:50051", "leave out http:// and paths"),
        ("127.0.0.1:50051/", "leave out http:// and paths"),
        ("127.0.0.1:99999", "ports are from 1 to 65535"),
        ("127.0.0.1:0", "ports are from 1 to 65535"),
        ("::1:50051", "[::1]:50051 for IPv6"),
    ],
)
def test_address_that_grpc_would_guess_at_is_refused(
    given: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["generate", "hi"], ["chat"], ["health"], ["reload"]):
        with pytest.raises(SystemExit):
            main([*command, "--address", given])
        assert hint in capsys.readouterr().err


@pytest.mark.parametrize("given", ["127.0.0.1:50051", "[::1]:1", "example.org:65535"])
def test_address_is_a_host_and_a_port(given: str) -> None:
    args = build_parser().parse_args(["generate", "hi", "--address", given])
    assert args.address == given
