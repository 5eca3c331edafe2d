"""The port for metrics: which one it is, and that HTTP's own server serves it."""

import logging
import socket
import urllib.request

import pytest

from quill.__main__ import build_parser
from quill.server.settings import read_settings
from tests.server.running import running_server
from tests.server.scripted_session import TIMEOUT_S


def scrape(port: int, accept: str) -> tuple[str, str]:
    """The content type and the text."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"accept": accept})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        return response.headers["content-type"], str(response.read(), "utf-8")


def test_port_that_is_taken_is_replaced_where_none_was_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running_server(port=port - 1, metrics_port="auto") as running:
            found = running.server.metrics_port
            assert found is not None
            assert found != port
            for accept, kind in (("*/*", "text/plain"), ("application/openmetrics-text", "app")):
                given, text = scrape(found, accept)
                assert given.startswith(kind)
                assert "quill_max_num_seqs" in text
    assert f"port {port} is taken" in caplog.text
    assert f"metrics at http://127.0.0.1:{found}/metrics" in caplog.text


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ((), (50052, 0)),
        (("--port", "65535"), (0,)),
        (("--port", "0"), (0,)),
        (("--metrics-port", "5"), (5,)),  # somebody scrapes it: another is of no use
        (("--metrics-port", "off"), ()),
    ],
)
def test_metrics_port_is_the_next_one_or_as_it_was_given(
    given: tuple[str, ...], chosen: tuple[int, ...]
) -> None:
    settings = read_settings(build_parser().parse_args(["serve", "x", *given]))
    assert settings.metrics_ports == chosen
