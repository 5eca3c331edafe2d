"""A small HTTP client for tests: it sends anything, right or wrong.

Knows: HTTP/1.1, server-sent events. Does not know: what is right.
"""

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.server.scripted_session import TIMEOUT_S

JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The data of a stream, but for its end and its comments."""
        lines = self.body.decode().split("\n\n")
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [json.loads(each) for each in data if each != "[DONE]"]


class HttpClient:
    def __init__(self, port: int, headers: Mapping[str, str] | None = None) -> None:
        self.port = port
        self._headers = dict(headers or {})

    def get(self, path: str, **headers: str) -> Reply:
        return self.ask("GET", path, None, headers)

    def post(self, path: str, body: Any, headers: Mapping[str, str] = JSON) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask("POST", path, data, headers)

    def ask(self, verb: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        try:
            connection.request(verb, path, body, self._headers | dict(headers))
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, found, response.read())
        finally:
            connection.close()


def head(verb: str, path: str, *lines: str, host: str = "127.0.0.1") -> bytes:
    return "\r\n".join((f"{verb} {path} HTTP/1.1", f"host: {host}", *lines, "", "")).encode()


def whole_request(path: str, content: Any, *lines: str) -> bytes:
    body = json.dumps(content).encode()
    own = ("content-type: application/json", f"content-length: {len(body)}")
    return head("POST", path, *own, *lines) + body


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    """For those who say things that no library would."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as sock:
        yield sock


def read_until_closed(sock: socket.socket) -> bytes:
    pieces = []
    try:
        while piece := sock.recv(65536):
            pieces.append(piece)
    except ConnectionResetError:
        pass
    return b"".join(pieces)


def read_until(sock: socket.socket, wanted: bytes) -> bytes:
    found = b""
    while wanted not in found:
        piece = sock.recv(65536)
        assert piece, f"the connection ended after {found!r}"
        found += piece
    return found
