"""HTTP requests to one server, with the client's TLS certificates.

Knows: HTTP, TLS, connections that are kept alive. Does not know: what is sent.
"""

import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Mapping
from typing import NamedTuple


class HttpResponse(NamedTuple):
    status: int
    reason: str
    headers: http.client.HTTPMessage
    content: bytes


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


class _Connection(http.client.HTTPConnection):
    def __init__(self, address: str, tls: ssl.SSLContext | None, server_name: str) -> None:
        super().__init__(*split_address(address))
        self._tls, self._server_name = tls, server_name

    def connect(self) -> None:
        super().connect()
        if self._tls is not None:
            name = self._server_name or self.host
            self.sock = self._tls.wrap_socket(self.sock, server_hostname=name)


class HttpClient:
    """Blocking; each thread has a connection of its own. Errors are OSErrors and HTTPExceptions."""

    def __init__(
        self, address: str, tls: ssl.SSLContext | None, headers: Mapping[str, str], name: str = ""
    ) -> None:
        """`name`: what the server's certificate is for, if that isn't the host."""
        self._address, self._tls, self._name = address, tls, name
        self._headers = headers
        self._own = threading.local()
        self._open: set[_Connection] = set()
        self._is_canceled = False

    def cancel(self) -> None:
        """Ends the requests of all threads."""
        self._is_canceled = True
        for connection in tuple(self._open):
            if connection.sock is not None:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """When no thread has a request any more."""
        for connection in self._open:
            connection.close()

    def request(
        self, method: str, path: str, body: bytes | None = None, timeout_s: float | None = None
    ) -> HttpResponse:
        """A kept connection that the server has closed meanwhile is replaced by a new one."""
        while True:
            kept: _Connection | None = getattr(self._own, "connection", None)
            connection = kept or _Connection(self._address, self._tls, self._name)
            self._open.add(connection)
            self._own.connection = None
            try:
                connection.timeout = timeout_s
                if connection.sock is not None:
                    connection.sock.settimeout(timeout_s)
                connection.request(method, path, body, self._headers)
                reply = connection.getresponse()
                content = reply.read()
                self._own.connection = None if reply.will_close else connection
                return HttpResponse(reply.status, reply.reason, reply.headers, content)
            except ConnectionError:
                if kept is None or self._is_canceled:
                    raise
            finally:
                if getattr(self._own, "connection", None) is not connection:
                    self._open.discard(connection)
                    connection.close()
