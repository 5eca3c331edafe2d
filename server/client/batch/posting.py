"""A line in OpenAI's own form, posted as it is to the door that understands it.

Knows: HTTP, the form of OpenAI's files. Does not know: which server, what bodies say.

A line is {"custom_id", "method", "url", "body"}, and its answer {"custom_id", "response", "error"}.
"""

import contextlib
import http.client
import json
import socket
import threading
from dataclasses import dataclass
from typing import Any

import grpc

from quill.server.client.access import Access
from quill.server.client.batch.line import Json
from quill.server.client.errors import CallError
from quill.server.errors import InvalidFieldError

_GENERATING = ("/v1/chat/completions", "/v1/completions")
PATHS = (*_GENERATING, "/v1/embeddings")
_CACHED = "prompt_tokens_details"
_CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.UNAVAILABLE,
}


@dataclass(frozen=True)
class Posted:
    path: str
    body: Json


@dataclass(frozen=True)
class Reply:
    """What HTTP answered. A refusal that is the line's own fault is one, too."""

    status: int
    body: Json


def read_posted(found: Json, seed: int) -> Posted:
    """`seed`: for a body that has none of its own."""
    path, body = found.get("url"), found.get("body")
    if found.get("method", "POST") != "POST":
        raise InvalidFieldError("method", "must be POST")
    if path not in PATHS:
        raise InvalidFieldError("url", f"isn't known here; there are {', '.join(PATHS)}")
    if not isinstance(body, dict):
        raise InvalidFieldError("body", "must be an object")
    if body.get("stream"):
        raise InvalidFieldError("body.stream", "is true; a file has whole answers. Leave it out")
    if path in _GENERATING and body.get("seed") is None:
        body = body | {"seed": seed}
    return Posted(path, body)


def lasting(reply: Reply, name: str) -> Json:
    """Without what differs from run to run: times, what caches saved, and ids, which get a name."""
    body = dict(reply.body)
    body.pop("timings", None)
    if "id" in body:
        body["id"] = f"{str(body['id']).partition('-')[0]}-{name}"
    if "created" in body:
        body["created"] = 0
    if isinstance(body.get("usage"), dict):
        body["usage"] = {key: n for key, n in body["usage"].items() if key != _CACHED}
    return body


class Poster:
    """Of one server. Blocking; each thread has a connection of its own."""

    def __init__(self, address: str, access: Access) -> None:
        host, _, port = address.rpartition(":")
        self._place = (host.removeprefix("[").removesuffix("]"), int(port))
        self._tls = access.http_context() if access.uses_tls else None
        access.credentials(address)  # says so where a key would be seen by others
        self._headers = {"Content-Type": "application/json", **dict(access.metadata)}
        self._own = threading.local()
        self._all: set[http.client.HTTPConnection] = set()
        self._is_closed = False

    def hang_up(self) -> None:
        """Whoever waits for an answer waits no longer."""
        self._is_closed = True
        for connection in tuple(self._all):
            if connection.sock is not None:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """When nobody posts any more."""
        for connection in self._all:
            connection.close()

    def post(self, posted: Posted, timeout_s: float | None) -> Reply:
        """Errors are CallErrors."""
        try:
            status, headers, content = self._exchange(posted, timeout_s)
        except TimeoutError as error:
            reason = f"no answer for {timeout_s:g} s"
            raise CallError(grpc.StatusCode.DEADLINE_EXCEEDED, reason) from error
        except (OSError, http.client.HTTPException) as error:
            reason = f"HTTP at {self._place[0]}:{self._place[1]} fails: {error}"
            raise CallError(grpc.StatusCode.UNAVAILABLE, reason) from error
        body = _object(content)
        if status not in _CODES:
            return Reply(status, body)
        told = body.get("error")
        reason = str(told.get("message")) if isinstance(told, dict) else f"HTTP {status}"
        raise CallError(_CODES[status], reason, retry_after_s=_retry_after_s(headers))

    def _exchange(
        self, posted: Posted, timeout_s: float | None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """A connection that the server has closed meanwhile is no error: another one is made."""
        text = json.dumps(posted.body).encode()
        while True:
            used: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
            connection = used or self._connect()
            self._own.connection = None
            try:
                connection.timeout = timeout_s
                if connection.sock is not None:
                    connection.sock.settimeout(timeout_s)
                connection.request("POST", posted.path, text, self._headers)
                reply = connection.getresponse()
                content = reply.read()
                self._own.connection = None if reply.will_close else connection
                return reply.status, reply.headers, content
            except ConnectionError:
                if used is None or self._is_closed:
                    raise
            finally:
                if getattr(self._own, "connection", None) is not connection:
                    self._all.discard(connection)
                    connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(*self._place)
        if self._tls is not None:
            connection = http.client.HTTPSConnection(*self._place, context=self._tls)
        self._all.add(connection)
        return connection


def _retry_after_s(headers: http.client.HTTPMessage) -> float | None:
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        told = headers.get(name, "")
        if told.isdecimal():
            return int(told) / unit
    return None


def _object(content: bytes) -> Json:
    try:
        found: Any = json.loads(content)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}
