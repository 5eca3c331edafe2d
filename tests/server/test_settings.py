"""The table of serve options: flags, values, the page, and what a server rejects to start with."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from quill.__main__ import build_parser
from quill.server.addresses import is_loopback
from quill.server.errors import StartError
from quill.server.settings import (
    CLUSTER_OPTIONS,
    OPTIONS,
    SECTIONS,
    Settings,
    add_options,
    as_plain,
    check_exposure,
    from_plain,
    options_page,
    read_settings,
)

PAGE = Path(__file__).parents[2] / "server/docs/serve-options.md"
TLS: dict[str, Any] = {"tls_cert": Path("cert.pem"), "tls_key": Path("key.pem")}


def settings_for(*arguments: str) -> Settings:
    return read_settings(build_parser().parse_args(["serve", "/nowhere", *arguments]))


def test_the_command_line_without_options_is_the_table_s_defaults() -> None:
    assert settings_for() == Settings()


def test_the_page_is_written_from_the_table() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert written == options_page(), "python -m quill.server.settings > server/docs/…"
    assert all(f"`{option.flag}" in written for option in OPTIONS.values())
    assert {option.section for option in OPTIONS.values()} == set(SECTIONS)


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (("--host", "[::1]"), "host", "::1"),
        (("--kv-cache-mb", "7"), "kv_cache_mb", 7),
        (("--drain-timeout", "0"), "drain_timeout_s", 0.0),
        (("--no-prefix-cache",), "prefix_cache", False),
        (("--share-prefix-cache",), "share_prefix_cache", True),
        (("--http-port", "off"), "http_port", "off"),
        (("--api-keys", "k"), "api_keys", Path("k")),
        (("--allow-unauthenticated", "metrics"), "allow_unauthenticated", ("metrics",)),
    ],
)
def test_a_flag_sets_its_field(arguments: tuple[str, ...], name: str, value: object) -> None:
    assert getattr(settings_for(*arguments), name) == value


@pytest.mark.parametrize(
    "arguments",
    [
        ("--port", "65536"),
        ("--threads", "0"),
        ("--drain-timeout", "-1"),
        ("--watchdog", "0"),
        ("--watchdog", "nan"),
        ("--metrics-port", "on"),
        ("--log-format", "xml"),
        ("--allow-unauthenticated", "health"),
    ],
)
def test_a_value_out_of_range_is_rejected(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        settings_for(*arguments)


def test_another_command_has_the_options_that_it_names_and_its_own_defaults() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, CLUSTER_OPTIONS, defaults={"log_format": "json"}, helps={"threads": "T"})
    given = parser.parse_args(["--max-queue", "3"])
    assert "host" not in vars(given)
    assert read_settings(given) == Settings(log_format="json", max_queue=3)


def test_plain_values_come_back_as_the_same_settings() -> None:
    settings = Settings(api_keys=Path("k"), allow_unauthenticated=("metrics",), watchdog_s=2.5)
    assert from_plain(as_plain(settings, OPTIONS)) == settings


@pytest.mark.parametrize(
    "values",
    [
        {"queue": 3},
        {"max_queue": 0},
        {"max_queue": None},
        {"prefix_cache": "yes"},
        {"log_format": "xml"},
        {"allow_unauthenticated": "metrics"},
        {"allow_unauthenticated": ["health"]},
    ],
)
def test_a_bad_plain_value_is_rejected_by_its_name(values: dict[str, Any]) -> None:
    with pytest.raises(StartError, match=next(iter(values))):
        from_plain(values)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_protection(host: str) -> None:
    assert is_loopback(host)
    check_exposure(Settings(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "10.0.0.1", "example.org", ""])
def test_other_addresses_need_tls_or_insecure(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(StartError, match="--insecure"):
        check_exposure(Settings(host=host))
    check_exposure(Settings(host=host, insecure=True))


def test_other_addresses_need_keys_or_client_certificates() -> None:
    with pytest.raises(StartError, match="--api-keys or --client-ca"):
        check_exposure(Settings(host="0.0.0.0", **TLS))
    with pytest.raises(StartError, match="--tls-cert"):
        check_exposure(Settings(host="0.0.0.0", api_keys=Path("keys.json")))
    check_exposure(Settings(host="0.0.0.0", **TLS, api_keys=Path("keys.json")))
    check_exposure(Settings(host="0.0.0.0", **TLS, client_ca=Path("ca.pem")))


@pytest.mark.parametrize("option", ["--tls-cert", "--tls-key", "--client-ca"])
def test_half_of_tls_is_rejected(option: str) -> None:
    with pytest.raises(StartError, match=option):
        settings_for(option, "a")


def test_several_names_of_the_model_are_given_by_one_flag() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, ["served_model_name"])
    given = ["--served-model-name", "gpt-4o", "mine", "--served-model-name", "third"]
    assert read_settings(parser.parse_args(given)).served_model_name == ("gpt-4o", "mine", "third")
    with pytest.raises(SystemExit):
        parser.parse_args(["--served-model-name", "a\nb"])
