"""OpenAI's HTTP: chats and completions, told by server-sent events.

Knows: HTTP/1.1, connections that are used again. Does not know: clocks, what events say.
"""

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quill.loadtest.protocols.door import CallError, Chunks
from quill.loadtest.protocols.openai_json import failure, path_and_body, read_chunks
from quill.protos import generation_pb2 as pb
from quill.server.client.access import Access

TIMEOUT_HEADER = "x-request-timeout"
PATIENCE_S = 5.0  # the server's word about a deadline comes a little after it
_PIECE = 64 * 1024
_EMBEDDINGS = "/v1/embeddings"


class HttpDoor:
    """As many connections as there are calls at once."""

    def __init__(self, address: str, access: Access | None = None) -> None:
        self._address = address
        self._access = access or Access()
        self._headers = {"Content-Type": "application/json", **dict(self._access.metadata)}
        self._tls = self._access.http_context() if self._access.uses_tls else None
        self._access.credentials(address)  # says so where a key would be seen by others
        self._idle: list[http.client.HTTPConnection] = []

    def stream(self, request: pb.GenerateRequest, timeout_s: float) -> Chunks:
        """Whoever closes it hangs up: HTTP has no other way to leave."""
        path, body = path_and_body(request)
        with self._asking(path, body, timeout_s) as response:
            yield from read_chunks(request, read_events(response))

    def embed(self, request: pb.EmbedRequest, timeout_s: float) -> pb.EmbedResponse:
        raise CallError("UNIMPLEMENTED", "vectors are asked for over gRPC")

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    @contextmanager
    def _asking(
        self, path: str, body: dict[str, Any], timeout_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        connection = None
        try:
            connection, response = self._ask(path, body, timeout_s)
            if response.status != http.client.OK:
                raise failure(response.status, response.read())
            yield response
            response.read()  # what is left is the end
            self._idle.append(connection)
            connection = None
        except TimeoutError as error:
            raise CallError("DEADLINE_EXCEEDED", f"no word for {timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise CallError("UNAVAILABLE", f"the connection broke: {error!r}") from error
        finally:
            if connection is not None:
                connection.close()

    def _ask(
        self, path: str, body: dict[str, Any], timeout_s: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A connection that the server has closed meanwhile is no error: another one is made."""
        headers = self._headers | {TIMEOUT_HEADER: f"{timeout_s:g}"}
        while True:
            connection = self._take_idle() or self._connect(timeout_s + PATIENCE_S)
            is_used = connection.sock is not None
            try:
                if connection.sock is not None:
                    connection.sock.settimeout(timeout_s + PATIENCE_S)
                connection.request("POST", path, json.dumps(body), headers)
                return connection, connection.getresponse()
            except ConnectionError:
                connection.close()
                if not is_used:
                    raise
            except BaseException:
                connection.close()
                raise

    def _take_idle(self) -> http.client.HTTPConnection | None:
        try:
            return self._idle.pop()  # one step for all threads
        except IndexError:
            return None

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        host, _, port = self._address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if self._tls is None:
            return http.client.HTTPConnection(host, int(port), timeout=timeout_s)
        return http.client.HTTPSConnection(host, int(port), timeout=timeout_s, context=self._tls)


def read_events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """What each event has as data. Comments aren't events."""
    rest = b""
    while piece := response.read1(_PIECE):
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            field, _, data = event.partition(b": ")
            if field == b"data":
                yield data
