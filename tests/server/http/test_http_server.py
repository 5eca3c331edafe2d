"""Connections that do harm, and TLS: whoever else calls is served as if nobody had."""

import contextlib
import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from quill.server.http import connection, exchange
from quill.server.settings import TlsFiles
from tests.server.authority import Authority, Signed, write
from tests.server.http_client import (
    HttpClient,
    connected,
    head,
    read_until,
    read_until_closed,
    whole_request,
)
from tests.server.running import Running, running_server
from tests.server.scripted_session import TIMEOUT_S

CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
ENDLESS = ASKED | {"max_tokens": 150, "stream": True, "ignore_eos": True}


def ask(running: Running) -> str:
    reply = HttpClient(running.http_port).post(CHAT, ASKED)
    return str(reply.json["choices"][0]["message"]["content"])


@pytest.fixture
def running() -> Iterator[Running]:
    with running_server(http_port=0) as server:
        yield server


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """With less time for those who dawdle, and enough for everybody else."""
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 2.0)
    monkeypatch.setattr(exchange, "BODY_TIMEOUT_S", 2.0)
    with running_server(http_port=0) as server:
        yield server


@pytest.mark.parametrize("said", [b"", b"POST / HT", head("POST", CHAT)[:-2]])
def test_silent_and_half_sent_heads_are_hung_up_on(
    impatient: Running, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(impatient.http_port) as sock:
        sock.sendall(said)
        assert read_until_closed(sock) == b""
    monkeypatch.undo()
    assert ask(impatient) == "lmn"


def test_half_a_head_after_a_whole_request_is_hung_up_on(impatient: Running) -> None:
    with connected(impatient.http_port) as sock:
        sock.sendall(head("GET", "/version") + b"GET /ver")
        assert read_until_closed(sock).startswith(b"HTTP/1.1 200")


def test_a_head_byte_by_byte_has_no_more_time(impatient: Running) -> None:
    with connected(impatient.http_port) as sock:
        sock.sendall(b"GET /version HTTP/1.1\r\nx: ")
        sock.settimeout(0.02)
        heard = None
        while heard is None:
            with contextlib.suppress(TimeoutError):
                heard = sock.recv(1)
            with contextlib.suppress(OSError):
                sock.sendall(b"x")
        assert heard == b""


def test_half_a_body_is_a_408_and_the_end(impatient: Running) -> None:
    with connected(impatient.http_port) as sock:
        sock.sendall(whole_request(CHAT, ASKED)[:-5])
        reply = read_until_closed(sock)
    assert reply.startswith(b"HTTP/1.1 408")
    assert impatient.next_record("INVALID_ARGUMENT").bad_field == "body"


def test_large_heads_are_refused(running: Running) -> None:
    with connected(running.http_port) as sock:
        sock.sendall(b"GET /version HTTP/1.1\r\nx: " + b"x" * (2 * connection.MAX_HEAD_BYTES))
        assert read_until_closed(sock)[:12] in (b"HTTP/1.1 400", b"")
    assert ask(running) == "lmn"


@pytest.mark.parametrize(
    "lines", [["x: " + "x" * 70_000], ["x: " + "x" * 7_000] * 10, ["a:"] * 12_000]
)
def test_large_heads_are_refused_when_they_come_whole(running: Running, lines: list[str]) -> None:
    with connected(running.http_port) as sock:
        sock.sendall(head("GET", "/version", *lines))
        assert read_until_closed(sock)[:12] in (b"HTTP/1.1 400", b"")


@pytest.mark.parametrize("announces", [True, False])
def test_a_hundred_megabytes_are_not_kept(running: Running, announces: bool) -> None:
    length = 100 * 2**20
    size = f"content-length: {length}" if announces else "transfer-encoding: chunked"
    piece = b"x" * 2**20
    sent = piece if announces else b"100000\r\n" + piece + b"\r\n"
    with connected(running.http_port) as sock:
        sock.sendall(head("POST", CHAT, "content-type: application/json", size))
        try:
            for _ in range(100):
                sock.sendall(sent)
        except OSError:
            pass  # it had heard enough
        assert ask(running) == "lmn"
    assert running.next_record("INVALID_ARGUMENT").bad_field == "body"


@pytest.mark.parametrize(
    "lines",
    [
        ("content-length: 5", "transfer-encoding: chunked"),
        ("content-length: 5", "content-length: 6"),
        ("content-length: +5",),
        ("content-length: 5, 6",),
        ("transfer-encoding: xchunked",),
        ("transfer-encoding: chunked, identity",),
        ("transfer-encoding : chunked",),
        (" transfer-encoding: chunked",),
        ("host: 127.0.0.1",),  # a second one
        ("x: a\0b",),
        ("x: a\nb",),
    ],
)
def test_smuggled_requests_are_never_answered(running: Running, lines: tuple[str, ...]) -> None:
    smuggled = head("GET", "/version")
    start = head("POST", CHAT, "content-type: application/json", *lines)
    with connected(running.http_port) as sock:
        sock.sendall(start + b"0\r\n\r\n" + smuggled)
        reply = read_until_closed(sock)
    assert reply.startswith((b"HTTP/1.1 4", b"HTTP/1.1 501"))
    assert b'"version"' not in reply


@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
def test_garbage_after_an_answer_is_hung_up_on(
    running: Running, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Where a refusal is quicker than a body, and where an answer is under way."""
    running.session.hold()
    chunk = json.dumps(ENDLESS).encode()
    whole = f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n"
    is_answered = kind == "application/json"
    with connected(running.http_port) as sock:
        sock.sendall(head("POST", CHAT, f"content-type: {kind}", "transfer-encoding: chunked"))
        if is_answered:
            sock.sendall(whole + b"0\r\n\r\n")
            running.wait_for_requests(1)
        else:
            read_until(sock, b"content-type must be")
        sock.sendall(b"garbage\r\n\r\n" * 3)
        running.session.let_go()
        heard = read_until_closed(sock)
    assert heard.count(b"200 OK") == is_answered
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


def test_what_is_no_http_is_told_so_in_json(running: Running) -> None:
    with connected(running.http_port) as sock:
        sock.sendall(b"SSH-2.0-nobody\r\n\r\n")
        reply = read_until_closed(sock)
    assert reply.startswith(b"HTTP/1.1 400")
    assert b'"type":"invalid_request_error"' in reply


def test_other_versions_of_http_get_one_answer(running: Running) -> None:
    with connected(running.http_port) as sock:
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        reply = read_until_closed(sock)
    assert (reply[:12], reply.count(b"HTTP/1.1 ")) == (b"HTTP/1.1 400", 1)


def test_two_requests_in_a_row_are_answered_in_order(running: Running) -> None:
    with connected(running.http_port) as sock:
        sock.sendall(head("GET", "/version") + head("GET", "/health", "connection: close"))
        reply = read_until_closed(sock)
    assert reply.index(b"version") < reply.index(b"serving")


def test_no_protocol_is_changed_to(running: Running) -> None:
    for other in ("websocket", "h2c"):
        lines = ("connection: upgrade, close", f"upgrade: {other}", "sec-websocket-version: 13")
        with connected(running.http_port) as sock:
            sock.sendall(head("GET", "/version", *lines))
            assert read_until_closed(sock).startswith(b"HTTP/1.1 200")


def test_idle_connections_make_place_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 20)
    with running_server(http_port=0) as running, ExitStack() as stack:
        running.session.hold()
        busy = stack.enter_context(connected(running.http_port))
        busy.sendall(whole_request(CHAT, ENDLESS))
        running.wait_for_requests(1)
        idle = [stack.enter_context(connected(running.http_port)) for _ in range(100)]
        running.session.let_go()
        assert ask(running) == "lmn"
        assert read_until_closed(idle[0]) == b""
        assert b"[DONE]" in read_until(busy, b"[DONE]")


def test_half_bodies_make_place_for_whole_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 20)
    half = whole_request(CHAT, ENDLESS)[:-5]
    with running_server(http_port=0) as running, ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(connected(running.http_port)).sendall(half)
        assert ask(running) == "lmn"


def test_who_sends_too_much_ahead_is_hung_up_on(running: Running) -> None:
    running.session.hold()
    with connected(running.http_port) as sock:
        sock.sendall(whole_request(CHAT, ENDLESS | {"stream": False}))
        running.wait_for_requests(1)
        with contextlib.suppress(ConnectionError):
            sock.sendall(head("GET", "/version") * 3000)
        running.wait_for_requests(0)
    assert running.next_record("CANCELLED").method == CHAT


# Whatever follows a request, it is heard that its client leaves.
@pytest.mark.parametrize(
    ("more", "user"),
    [(b"", "u"), (b"\r\n", "u"), (head("GET", "/health"), "u"), (b"", "u" * 500_000)],
    ids=["nothing", "a line", "a request", "a large body before it"],
)
def test_disconnect_in_prefill_cancels(running: Running, more: bytes, user: str) -> None:
    running.session.hold()
    for stream in (True, False):
        with connected(running.http_port) as sock:
            sock.sendall(whole_request(CHAT, ENDLESS | {"stream": stream, "user": user}))
            running.wait_for_requests(1)
            sock.sendall(more)
        running.wait_for_requests(0)
        assert running.next_record("CANCELLED").method == CHAT
    num_steps = running.session.num_steps
    running.session.let_go()
    assert ask(running) == "lmn"
    assert running.session.num_steps <= num_steps + 2 + 3


def test_disconnect_in_the_middle_cancels_within_two_steps(running: Running) -> None:
    running.session.hold()
    running.session.let_go(1)
    with connected(running.http_port) as sock:
        sock.sendall(whole_request(CHAT, ENDLESS))
        read_until(sock, b'"l"')
    running.next_record("CANCELLED")
    num_steps = running.session.num_steps
    running.session.let_go()
    assert ask(running) == "lmn"
    assert running.session.num_steps <= num_steps + 2 + 3


def test_who_never_reads_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small buffer, so that few tokens fill it."""
    with running_server(http_port=0, write_timeout_s=0.3) as running:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            sock.connect(("127.0.0.1", running.http_port))
            # Some megabytes: more than the system takes for the sake of a reader.
            prompts = ["a" * 50] * 1000
            asked = {"prompt": prompts, "max_tokens": 100, "logprobs": 20, "echo": True}
            sock.sendall(whole_request("/v1/completions", asked | {"stream": True}))
            assert running.next_record("ABORTED").method == "/v1/completions"
        assert ask(running) == "lmn"


def test_silence_is_broken_by_a_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "QUIET_S", 0.05)
    with running_server(http_port=0) as running:
        running.session.hold()
        with connected(running.http_port) as sock:
            sock.sendall(whole_request(CHAT, ASKED | {"stream": True}))
            heard = read_until(sock, b": still here\n\n")
            assert heard.startswith(b"HTTP/1.1 200")
            running.session.let_go()
            read_until(sock, b"[DONE]")


def test_drain_finishes_what_runs_and_refuses_the_rest() -> None:
    with running_server(http_port=0, drain_timeout_s=TIMEOUT_S) as running:
        running.session.hold()
        running.session.let_go(1)
        with connected(running.http_port) as sock:
            sock.sendall(whole_request(CHAT, ASKED | {"stream": True}))
            read_until(sock, b'"l"')
            running.stop()
            running.wait_for(lambda: not running.server.health.is_serving)
            client = HttpClient(running.http_port)
            assert client.get("/health").status == 503
            assert client.post(CHAT, ASKED).status == 503
            running.session.let_go()
            assert b"[DONE]" in read_until_closed(sock)
        running.join()
        with pytest.raises(OSError):  # noqa: PT011
            connected(running.http_port).__enter__()


def test_stream_that_outlives_the_drain_ends_with_an_error() -> None:
    with running_server(http_port=0, drain_timeout_s=0.05) as running:
        running.session.hold()
        running.session.let_go(1)
        with connected(running.http_port) as sock:
            sock.sendall(whole_request(CHAT, ENDLESS))
            read_until(sock, b'"l"')
            running.stop()
            running.wait_for(running.server.closing.is_set)
            running.session.let_go()
            ended = read_until_closed(sock)
        last = ended.split(b"data: ")[-1].split(b"\n")[0]
        assert json.loads(last)["error"]["type"] == "service_unavailable_error"
        running.join()


# ----------------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def ours() -> Authority:
    return Authority("ours")


def https(port: int, authority: Authority, client: Signed | None, directory: Path) -> ssl.SSLSocket:
    context = ssl.create_default_context(cadata=authority.cert.decode())
    if client is not None:
        (directory / "client.crt").write_bytes(client.cert)
        (directory / "client.key").write_bytes(client.key)
        context.load_cert_chain(directory / "client.crt", directory / "client.key")
    sock = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
    return context.wrap_socket(sock, server_hostname="127.0.0.1")


def test_new_certificate_serves_the_next_connection(ours: Authority, tmp_path: Path) -> None:
    with (
        running_server(http_port=0, tls=write(tmp_path, ours.sign("old"))) as running,
        https(running.http_port, ours, None, tmp_path) as old,
    ):
        write(tmp_path, ours.sign("new"))
        with https(running.http_port, ours, None, tmp_path) as new:
            assert b"old" in (old.getpeercert(binary_form=True) or b"")
            assert b"new" in (new.getpeercert(binary_form=True) or b"")
        old.sendall(head("GET", "/version", "connection: close"))
        assert b"200 OK" in read_until_closed(old)


def test_client_certificate_is_wanted_and_names_its_caller(ours: Authority, tmp_path: Path) -> None:
    files = write(tmp_path, ours.sign("server"))
    (tmp_path / "ca.pem").write_bytes(ours.cert)
    tls = TlsFiles(cert=files.cert, key=files.key, client_ca=tmp_path / "ca.pem")
    with running_server(http_port=0, tls=tls) as running:
        port = running.http_port
        with https(port, ours, ours.sign("alice"), tmp_path) as sock:
            sock.sendall(head("GET", "/v1/models", "connection: close"))
            assert b"200 OK" in read_until_closed(sock)
        assert running.next_record("OK").caller == "127.0.0.1,localhost"
        for stranger in (None, Authority("theirs").sign("mallory")):
            assert b"200 OK" not in _reply_over_tls(port, ours, stranger, tmp_path)


def _reply_over_tls(port: int, ours: Authority, client: Signed | None, directory: Path) -> bytes:
    """A server that wants another certificate says so after the handshake, as TLS 1.3 has it."""
    with contextlib.suppress(ssl.SSLError), https(port, ours, client, directory) as sock:
        sock.sendall(head("GET", "/v1/models", "connection: close"))
        return read_until_closed(sock)
    return b""


def test_who_speaks_no_tls_is_hung_up_on(ours: Authority, tmp_path: Path) -> None:
    with (
        running_server(http_port=0, tls=write(tmp_path, ours.sign("server"))) as running,
        connected(running.http_port) as sock,
    ):
        sock.sendall(head("GET", "/version"))
        assert b"200" not in read_until_closed(sock)
