"""A server of our own: it is healthy when we get it, and gone when we leave."""

import urllib.request
from pathlib import Path

import pytest

from quill.loadtest.environment.process import free_port
from quill.loadtest.environment.server import (
    StartedServer,
    read_log,
    start_server,
    wait_until_healthy,
)
from quill.loadtest.errors import NoServerError
from quill.server.client.access import Access


def test_server_is_healthy_and_says_where_its_metrics_are(server: StartedServer) -> None:
    wait_until_healthy(server.address, timeout_s=5)
    assert server.metrics_url is not None
    with urllib.request.urlopen(server.metrics_url, timeout=5) as reply:
        assert b"quill_sequences_running" in reply.read()


def test_server_is_gone_afterwards(bundle: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with start_server(log, bundle, "--threads", "1", "--metrics-port", "off") as running:
        assert running.metrics_url is None
    assert "stopped" in log.read_text()
    with pytest.raises(NoServerError, match=f"no healthy server at {running.address}"):
        wait_until_healthy(running.address, timeout_s=0.1)


def test_server_that_was_told_to_log_for_people_is_found_all_the_same(
    bundle: Path, tmp_path: Path
) -> None:
    with start_server(
        tmp_path / "log", bundle, "--threads", "1", "--log-format", "text"
    ) as running:
        (ready,) = (entry for entry in read_log(tmp_path / "log") if "address" in entry)
        assert (ready["address"], ready["metrics"]) == (running.address, running.metrics_url)
        assert running.metrics_url is not None
        with urllib.request.urlopen(running.metrics_url, timeout=5) as reply:
            assert b"quill_sequences_running" in reply.read()


def test_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(NoServerError, match=r"code 1: .*no bundle at /nowhere"),
        start_server(tmp_path / "log", Path("/nowhere")),
    ):
        pass


def test_mix_up_of_tls_is_told_at_once(server: StartedServer) -> None:
    with pytest.raises(NoServerError, match=r"doesn't use TLS\. Leave out --tls"):
        wait_until_healthy(server.address, access=Access(tls=True))


def test_nobody_at_an_address_is_said_in_words() -> None:
    with pytest.raises(NoServerError, match="quill serve"):
        wait_until_healthy(f"127.0.0.1:{free_port()}", timeout_s=0.1)
