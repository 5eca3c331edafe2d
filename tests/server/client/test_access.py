"""What a client may prove itself with, and where a server may be reached."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from quill.__main__ import build_parser, main
from quill.server.addresses import is_loopback
from quill.server.client.access import Access, AccessError, read_access
from quill.server.errors import StartError
from quill.server.settings import Settings, TlsFiles, check_exposure, read_settings

TLS = TlsFiles(cert=Path("cert.pem"), key=Path("key.pem"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_protection(host: str) -> None:
    assert is_loopback(host)
    check_exposure(Settings(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "10.0.0.1", "example.org", ""])
def test_other_addresses_need_tls(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(StartError, match="--insecure"):
        check_exposure(Settings(host=host))
    check_exposure(Settings(host=host, insecure=True))


def test_other_addresses_need_to_know_who_calls() -> None:
    with pytest.raises(StartError, match="--api-keys or --client-ca"):
        check_exposure(Settings(host="0.0.0.0", tls=TLS))
    with pytest.raises(StartError, match="reads along"):
        check_exposure(Settings(host="0.0.0.0", api_keys=Path("keys.json")))
    check_exposure(Settings(host="0.0.0.0", tls=TLS, api_keys=Path("keys.json")))
    check_exposure(Settings(host="0.0.0.0", tls=replace(TLS, client_ca=Path("ca.pem"))))
    check_exposure(Settings(host="0.0.0.0", tls=TLS, insecure=True))


def settings_for(*options: str) -> Settings:
    return read_settings(build_parser().parse_args(["serve", "/nowhere", *options]))


def test_serve_on_all_addresses_without_protection_is_refused() -> None:
    with pytest.raises(StartError, match=r"--host 0\.0\.0\.0 can be reached from other"):
        check_exposure(settings_for("--host", "0.0.0.0"))
    check_exposure(settings_for("--host", "0.0.0.0", "--insecure"))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--tls-cert", "a"], "belong together"),
        (["--tls-key", "a"], "belong together"),
        (["--client-ca", "a"], "--client-ca needs"),
    ],
)
def test_half_of_tls_is_refused(options: list[str], reason: str) -> None:
    with pytest.raises(StartError, match=reason):
        settings_for(*options)


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


def test_commands_that_ask_one_server_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("health", "reload"):
        with pytest.raises(SystemExit):
            main([command, "--address", "quill://127.0.0.1:50051,127.0.0.1:50061"])
        assert "asks one server: give its own HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["127.0.0.1:50051", "[::1]:1", "example.org:65535"])
def test_address_is_a_host_and_a_port(given: str) -> None:
    args = build_parser().parse_args(["generate", "hi", "--address", given])
    assert args.address == given
