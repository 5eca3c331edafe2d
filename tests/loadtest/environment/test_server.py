"""A server of our own: it is healthy when we get it, and gone when we leave."""

import urllib.request
from pathlib import Path

import pytest

from quill.loadtest.environment.server import (
    StartedServer,
    read_log,
    start_server,
    wait_until_healthy,
)
from quill.loadtest.errors import NoServerError
from quill.server.client.access import Access


def test_server_is_healthy_and_says_where_its_metrics_are(server: StartedServer) -> None:
    wait_until_healthy(server.address, timeout_s=60)
    assert server.metrics_url is not None
    with urllib.request.urlopen(server.metrics_url, timeout=60) as reply:
        assert b"quill_sequences_running" in reply.read()


def test_server_is_gone_afterwards(bundle: Path, tmp_path: Path) -> None:
    log, options = tmp_path / "log", ("--threads", "1", "--metrics-port", "off")
    # A log for people couldn't be parsed: it is JSON all the same.
    with start_server(log, bundle, *options, "--log-format", "text") as running:
        assert running.metrics_url is None
        assert [entry["address"] for entry in read_log(log) if "address" in entry] == [
            running.address
        ]
    assert "stopped" in log.read_text()
    with pytest.raises(NoServerError, match=f"no healthy server at {running.address}.*quill serve"):
        wait_until_healthy(running.address, timeout_s=0.1)


def test_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(NoServerError, match=r"code 1: .*no file or directory '/nowhere'"),
        start_server(tmp_path / "log", Path("/nowhere")),
    ):
        pass


def test_mix_up_of_tls_is_told_at_once(server: StartedServer) -> None:
    with pytest.raises(NoServerError, match=r"doesn't use TLS\. Leave out --tls"):
        wait_until_healthy(server.address, access=Access(tls=True))
