"""Where HTTP listens.

Knows: sockets, TLS, the event loop that gRPC lives in. Does not know: HTTP itself.
"""

import asyncio
import socket
import ssl

from quill.server.addresses import open_first, write_address
from quill.server.auth.tls import http_context
from quill.server.errors import StartError
from quill.server.http.wire.connection import HEAD_TIMEOUT_S, Application, Connection
from quill.server.settings import Settings

BACKLOG = 1024
CLOSE_S = 1.0


class HttpServer:
    """Belongs to one event loop."""

    def __init__(self, app: Application, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None

    async def open(self) -> int:
        """The port that it took."""
        settings = self._settings
        sock = open_first(settings.http_ports, lambda port: bind(settings.host, port), "HTTP")
        tls = None if settings.tls is None else _following_context(settings)
        self._listener = await asyncio.get_running_loop().create_server(
            lambda: Connection(self._app, self._connections, settings.write_timeout_s),
            sock=sock,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else HEAD_TIMEOUT_S,
            backlog=BACKLOG,
        )
        return int(sock.getsockname()[1])

    def stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()

    async def close(self) -> None:
        """Ends what is left. Callers have their errors already."""
        self.stop_listening()
        for connection in list(self._connections):
            connection.close_when_idle()
        tasks = [each.task for each in self._connections if each.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)
        for connection in list(self._connections):
            connection.transport.abort()


def bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise StartError(
            f"can't serve HTTP at {write_address(host, port)}: {error.strerror}. Give another "
            "--http-port, or --http-port off"
        ) from error
    return sock


def _following_context(settings: Settings) -> ssl.SSLContext:
    """Each handshake takes the certificate as it is then; open connections keep theirs."""
    assert settings.tls is not None
    contexts = http_context(settings.tls)

    def follow(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = contexts.get()

    context = contexts.get()
    context.sni_callback = follow
    return context
