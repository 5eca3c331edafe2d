"""Paths, keys, deadlines, refusals: what is the same for all calls over HTTP."""

import json
import socket
from pathlib import Path

import pytest

from quill.server.auth.key_file import add_key, revoke_key
from quill.server.errors import StartError
from quill.server.http.chat import Chat
from quill.server.http.connection import bind
from tests.server.http_client import JSON, HttpClient, connected, read_until, whole_request
from tests.server.running import Running, running_server
from tests.server.scripted_session import TIMEOUT_S

CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


def client_of(running: Running, **headers: str) -> HttpClient:
    return HttpClient(running.http_port, headers)


def test_models_are_listed(client: HttpClient) -> None:
    (model,) = client.get("/v1/models").json["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("reciter", "model", "quill")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/", "/v1/chat", "/%2e%2e/etc/passwd"])
def test_unknown_paths_are_a_404_in_json(client: HttpClient, path: str) -> None:
    reply = client.post(path, {})
    assert (reply.status, reply.error["type"]) == (404, "not_found_error")


def test_wrong_method_is_told_the_right_one(client: HttpClient) -> None:
    reply = client.get(CHAT)
    assert (reply.status, reply.headers["allow"]) == (405, "POST")
    assert client.post("/health", {}).status == 405


def test_metrics_are_those_of_the_server(running: Running, client: HttpClient) -> None:
    client.post(CHAT, ASKED)
    running.next_record("OK")
    page = client.get("/metrics").body.decode()
    assert f'quill_requests_total{{method="{CHAT}",outcome="OK"}}' in page


def test_version_and_health_answer(client: HttpClient) -> None:
    assert client.get("/version").json["version"]
    assert client.get("/health").json == {"status": "serving"}


def test_health_says_so_while_the_model_is_loaded() -> None:
    with running_server(http_port=0, wait=False) as running:
        client = client_of(running)
        assert client.get("/health").status == 503
        reply = client.post(CHAT, ASKED)
        assert (reply.status, reply.error["type"]) == (503, "service_unavailable_error")


def test_request_id_is_in_the_answer_and_in_the_record() -> None:
    with running_server(http_port=0) as running:
        client = client_of(running)
        reply = client.post(CHAT, ASKED)
        record = running.next_record("OK")
        assert (record.request_id, record.method) == (reply.headers["x-request-id"], CHAT)
        refused = client.post(CHAT, ASKED | {"temperature": -1})
        record = running.next_record("INVALID_ARGUMENT")
        assert record.request_id == refused.headers["x-request-id"]
        assert record.bad_field == "temperature"


def test_keys_are_wanted_and_known(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    good, old = add_key(keys, "good"), add_key(keys, "old")
    revoke_key(keys, "old")
    with running_server(http_port=0, api_keys=keys) as running:
        for path in ("/v1/models", "/metrics"):
            reply = client_of(running).get(path)
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
            assert reply.error["type"] == "authentication_error"
            assert client_of(running, authorization="Bearer wrong").get(path).status == 401
            assert client_of(running, authorization=f"Bearer {old}").get(path).status == 403
            assert client_of(running, authorization=f"Bearer {good}").get(path).status == 200
        assert client_of(running).get("/health").status == 200
        # Before the body is read: who has no key has nothing to say.
        assert client_of(running).post(CHAT, b"{").status == 401


def test_full_queue_says_when_to_come_back() -> None:
    with running_server(http_port=0, max_num_seqs=1, max_waiting=1) as running:
        running.session.hold()
        running.session.let_go(1)
        client = client_of(running)
        with connected(client.port) as first, connected(client.port) as second:
            first.sendall(whole_request(CHAT, ASKED | {"stream": True}))
            read_until(first, b'"l"')
            second.sendall(whole_request(CHAT, ASKED))
            running.wait_for_waiting(1)
            reply = client.post(CHAT, ASKED)
            assert (reply.status, reply.error["code"]) == (429, "resource_exhausted")
            assert 100 <= int(reply.headers["retry-after-ms"]) <= 30_000
            # Before anything is sent: a stream that is refused has no 200.
            assert client.post(CHAT, ASKED | {"stream": True}).status == 429


def test_deadline_before_anything_is_a_408() -> None:
    with running_server(http_port=0) as running:
        running.session.hold()
        client = client_of(running)
        reply = client.post(CHAT, ASKED, JSON | {"x-request-timeout": "0.05"})
        assert (reply.status, reply.error["type"]) == (408, "timeout_error")
        assert running.next_record("DEADLINE_EXCEEDED").frontend == "http"


def test_deadline_in_the_middle_keeps_what_was_made() -> None:
    with running_server(http_port=0) as running:
        running.session.hold()
        running.session.let_go(1)
        with connected(client_of(running).port) as sock:
            asked = ASKED | {"stream": True, "max_tokens": 50}
            sock.sendall(whole_request(CHAT, asked, f"x-request-timeout: {TIMEOUT_S}"))
            read_until(sock, b'"l"')
            running.ahead_s = 2 * TIMEOUT_S  # long before the client's own deadline
            running.session.let_go()
            ended = read_until(sock, b"[DONE]")
        assert b'"finish_reason":"length","quill":{"finish_reason":"deadline"}' in ended


@pytest.mark.parametrize("given", ["soon", "-1", "0", "nan", "1e400"])
def test_bad_deadline_is_refused(client: HttpClient, given: str) -> None:
    reply = client.post(CHAT, ASKED, JSON | {"x-request-timeout": given})
    assert (reply.status, reply.error["param"]) == (400, "x-request-timeout")


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[1, 2]", b'"x"', b"\xff\xfe", b'{"messages": NaN}', b"[" * 100_000,
        b'{"a":' * 50_000, b"1" * 10_000,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "\\UD800"}]}',
        b'{"\\udfff": 1}',
    ],
)  # fmt: skip
def test_bodies_that_are_no_text_or_no_json_are_refused(client: HttpClient, body: bytes) -> None:
    reply = client.post(CHAT, body)
    assert (reply.status, reply.error["param"]) == (400, "body"), reply.body


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", ""])
def test_only_json_is_read(client: HttpClient, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    reply = client.post(CHAT, ASKED, headers)
    assert (reply.status, reply.error["param"]) == (415, "content-type")


def test_json_may_name_its_encoding(client: HttpClient) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert client.post(CHAT, ASKED, headers).status == 200


def test_too_large_a_body_is_refused(client: HttpClient) -> None:
    reply = client.post(CHAT, b" " * (2**20 + 1))
    assert (reply.status, reply.error["param"]) == (413, "body")


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "127.0.0.1.evil.example:80", "", "localhost@x", "["),
        *("evil.example@127.0.0.1", "127.0.0.1#evil.example", "127.0.0.1/x", "localhost?x"),
    ],
)
def test_foreign_host_is_refused_on_loopback(client: HttpClient, host: str) -> None:
    reply = client.post(CHAT, ASKED, JSON | {"host": host})
    assert (reply.status, reply.error["param"]) == (403, "host")


@pytest.mark.parametrize("host", ["localhost", "localhost:80", "127.0.0.1", "[::1]:5", "127.9.9.9"])
def test_names_of_this_machine_are_fine(client: HttpClient, host: str) -> None:
    assert client.get("/version", host=host).status == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", ""])
def test_foreign_origin_is_refused(client: HttpClient, origin: str) -> None:
    reply = client.post(CHAT, ASKED, JSON | {"origin": origin})
    assert (reply.status, reply.error["param"]) == (403, "origin")
    assert "access-control-allow-origin" not in reply.headers


def test_own_origin_is_fine(client: HttpClient) -> None:
    origin = f"http://127.0.0.1:{client.port}"
    assert client.post(CHAT, ASKED, JSON | {"origin": origin}).status == 200


def test_preflight_of_a_foreign_page_gets_no_leave(client: HttpClient) -> None:
    headers = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    reply = client.ask("OPTIONS", CHAT, None, headers)
    assert reply.status == 403
    assert not [name for name in reply.headers if name.startswith("access-control")]


def test_what_is_documented_is_what_is_checked(client: HttpClient) -> None:
    api = client.get("/openapi.json").json
    body = api["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert list(body["properties"]) == [field.name for field in Chat.fields]
    assert body["required"] == ["messages"]
    for path, operations in api["paths"].items():
        assert client.ask(next(iter(operations)).upper(), path, b"{}", JSON).status != 404


def test_page_of_documents_needs_nobody_else(client: HttpClient) -> None:
    reply = client.get("/docs")
    page = reply.body.decode()
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "<script" not in page
    assert "://" not in page
    assert all(f"<code>{field.name}</code>" in page for field in Chat.fields)


def test_failing_step_is_a_500_with_the_name_of_its_log_line() -> None:
    with running_server(http_port=0) as running:
        running.session.failures.append(RuntimeError("boom"))
        reply = client_of(running).post(CHAT, ASKED)
        assert (reply.status, reply.error["type"]) == (500, "server_error")
        assert reply.headers["x-request-id"] in reply.error["message"]
        running.session.failures.append(RuntimeError("boom"))
        reply = client_of(running).post(CHAT, ASKED | {"stream": True})
        assert reply.status == 500


def test_error_in_the_middle_of_a_stream_is_an_event() -> None:
    with running_server(http_port=0) as running:
        running.session.hold()
        running.session.let_go(2)
        client = client_of(running)
        with connected(client.port) as sock:
            sock.sendall(whole_request(CHAT, ASKED | {"stream": True, "max_tokens": 9}))
            begun = read_until(sock, b'm"}')
            running.session.failures.append(RuntimeError("boom"))
            running.session.let_go()
            ended = begun + read_until(sock, b"0\r\n\r\n")
        assert b"200 OK" in begun
        last = ended.split(b"data: ")[-1].split(b"\n")[0]
        assert json.loads(last)["error"]["type"] == "server_error"
        assert b"[DONE]" not in ended


def test_a_port_that_is_taken_isnt_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running_server(port=port - 2, http_port="auto") as running:
            assert running.server.http_port not in (None, port)
        with pytest.raises(StartError, match="--http-port off"):
            bind("127.0.0.1", port, "--http-port")
