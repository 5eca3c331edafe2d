"""Where a server says that it is: in words that can be typed as they are."""

import logging
import re
import shlex
import socket
import urllib.request

import pytest

from quill.__main__ import build_parser
from quill.server.addresses import write_address
from quill.server.client.sync_client import Client
from quill.server.settings import read_settings
from tests.server.running import running_server
from tests.server.scripted_session import TIMEOUT_S


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as attempt:
            attempt.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1:5"), ("::1", "[::1]:5"), ("example.org", "example.org:5")],
)
def test_only_ipv6_has_brackets(host: str, address: str) -> None:
    assert write_address(host, 5) == address


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_host_is_kept_without_brackets(host: str) -> None:
    arguments = ["serve", "/nowhere", "--host", host]
    assert read_settings(build_parser().parse_args(arguments)).host == "::1"


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6 on loopback")
def test_addresses_that_a_server_on_ipv6_prints_can_be_used(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), running_server(host="::1", metrics_port=0):
        printed = capsys.readouterr().out
        line = printed.splitlines()[1]
        assert "'[::1]:" in line  # some shells take brackets for a pattern
        args = build_parser().parse_args(shlex.split(line)[1:])
        assert printed.startswith(f"Serving at {args.address}. ")
        with Client(args.address) as client:
            assert client.model(timeout_s=TIMEOUT_S).name == "reciter"
        url = re.search(r"metrics at (\S+)", caplog.text)
        assert url is not None
        with urllib.request.urlopen(url[1], timeout=TIMEOUT_S) as reply:
            assert b"quill_max_num_seqs" in reply.read()
