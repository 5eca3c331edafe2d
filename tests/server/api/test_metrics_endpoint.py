"""The port for metrics: whoever connects and doesn't ask is hung up on, and others are served."""

import contextlib
import logging
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from quill.__main__ import build_parser
from quill.server.api.metrics_endpoint import serve_metrics
from quill.server.settings import TlsFiles, read_settings
from tests.server.authority import Authority, write
from tests.server.process import wait_until
from tests.server.running import running_server
from tests.server.scripted_session import TIMEOUT_S

OURS = Authority("ours")
NUM_CALLERS = 16  # more are hung up on at once
MAX_CALL_S = 0.2


@contextlib.contextmanager
def serving(tls: TlsFiles | None = None) -> Iterator[int]:
    registry = CollectorRegistry()
    Counter("calls", "Calls", registry=registry).inc(3)
    port, stop = serve_metrics(registry, "127.0.0.1", 0, tls, max_call_s=MAX_CALL_S)
    try:
        yield port
    finally:
        stop()


def scrape(port: int, scheme: str = "http") -> str:
    url = f"{scheme}://127.0.0.1:{port}/metrics"
    context = ssl.create_default_context(cadata=OURS.cert.decode())
    try:
        with urllib.request.urlopen(url, context=context, timeout=TIMEOUT_S) as reply:
            return str(reply.read(), "utf-8")
    except OSError:  # the callers before haven't left their places yet
        return ""


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("said", [b"", b"GET /metrics HTTP/1.1\r\nHost:"])
def test_port_recovers_from_callers_that_never_ask(
    scheme: str, said: bytes, tmp_path: Path
) -> None:
    with serving(write(tmp_path, OURS.sign("server")) if scheme == "https" else None) as port:
        address = ("127.0.0.1", port)
        callers = [socket.create_connection(address, TIMEOUT_S) for _ in range(NUM_CALLERS)]
        for caller in callers:
            caller.sendall(said)
        for caller in callers:
            wait_for_the_end(caller)
        wait_until(lambda: "calls_total 3.0" in scrape(port, scheme), "the port is open again")


def wait_for_the_end(caller: socket.socket) -> None:
    """With TLS the server may complain first."""
    with caller, contextlib.suppress(ConnectionResetError):
        while caller.recv(100):
            pass


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
            assert "quill_max_num_seqs" in scrape(found)
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


def test_caller_that_speaks_little_by_little_is_hung_up_on() -> None:
    with serving() as port, socket.create_connection(("127.0.0.1", port)) as caller:
        caller.settimeout(MAX_CALL_S / 4)
        for _ in range(1000):
            try:
                caller.sendall(b"G")
                if caller.recv(1) == b"":
                    return
            except TimeoutError:
                continue
            except ConnectionError:
                return
    raise AssertionError("the server listens for ever")
