"""Where HTTP is listened for, and who is hung up on.

Knows: uvicorn's parts that speak HTTP/1.1, sockets, TLS. Does not know: what is asked for.

uvicorn's own server would take over the process: its signals, its loop, its log. Only its protocol
is used here, in the event loop that gRPC lives in.
"""

import asyncio
import socket
import ssl
import time
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from quill.server.addresses import open_first, write_address
from quill.server.auth.tls import http_context
from quill.server.errors import StartError
from quill.server.http.wire.exchange import Application, dump
from quill.server.http.wire.refusals import RefusalError, body_of
from quill.server.settings import Settings

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 10.0  # for a handshake, and then for a request's head
KEEP_ALIVE_S = 30  # between two requests
MAX_CONNECTIONS = 1024
MAX_AHEAD_BYTES = 64 * 1024  # of what a client sends before it has its answer
BACKLOG = 1024
CLOSE_S = 1.0


class HttpServer:
    """Belongs to one event loop."""

    def __init__(self, app: Application, settings: Settings) -> None:
        self._settings = settings
        self._config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # what clients do wrong is theirs
            access_log=False,
            server_header=False,
            proxy_headers=False,
            interface="asgi3",
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._config.load()
        self._state = ServerState()
        self._listener: asyncio.Server | None = None

    async def open(self) -> int:
        """The port that it took."""
        settings = self._settings
        sock = open_first(settings.http_ports, lambda port: bind(settings.host, port), "HTTP")
        tls = None if settings.tls is None else _following_context(settings)
        self._listener = await asyncio.get_running_loop().create_server(
            lambda: _Protocol(self._config, self._state, {}),
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
        """Ends what is left. Calls have been told already."""
        self.stop_listening()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=CLOSE_S)
        for connection in list(self._state.connections):
            connection.transport.abort()


class _Protocol(H11Protocol):
    """One connection. It ends if a head takes too long, or if there are too many of them."""

    def __init__(self, config: uvicorn.Config, state: ServerState, app_state: dict[str, Any]):
        super().__init__(config, state, app_state)
        self._head_timer: asyncio.TimerHandle | None = None
        self.idle_since_s = time.monotonic()

    @property
    def is_idle(self) -> bool:
        """Whether nobody is at work for it."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_waiting(self) -> bool:
        """Whether the client is next: nothing was asked yet, or not all of it."""
        return self.is_idle or self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {"peer": _peer_names(transport), "abort": transport.abort}
        self._expect_head()
        if len(self.connections) > MAX_CONNECTIONS:
            self._make_place()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.is_waiting:
            self._keep_listening()
        if not self.is_idle:
            self._forget_head()
        elif self._head_timer is None:
            self._expect_head()

    def send_400_response(self, msg: str) -> None:
        """To bytes that are no HTTP. uvicorn's own fails where an answer has begun already."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = dump(
            body_of(RefusalError(400, "request", "isn't HTTP/1.1, or its head is too long"))
        )
        headers = [("content-type", "application/json"), ("connection", "close")]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def on_response_complete(self) -> None:
        self.idle_since_s = time.monotonic()
        super().on_response_complete()
        if self.is_idle and self.conn.trailing_data[0]:  # the next head has begun already
            self._expect_head()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _keep_listening(self) -> None:
        """uvicorn stops reading where something follows a request, and then can't hear that the
        client has left. What follows waits its turn, in bounds."""
        if len(self.conn.trailing_data[0]) > MAX_AHEAD_BYTES:
            self.transport.abort()
        else:
            self.flow.resume_reading()

    def _make_place(self) -> None:
        """Ends the connection that has waited for its client longest; if none has, this one."""
        waiting = [each for each in self.connections if isinstance(each, _Protocol)]
        waiting = [each for each in waiting if each.is_waiting and each is not self]
        oldest = min(waiting, key=lambda each: each.idle_since_s, default=self)
        self.connections.discard(oldest)  # now: others may come before it has gone
        oldest.transport.abort()


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
    """Each handshake takes the certificate as it is then; connections that stand aren't touched."""
    assert settings.tls is not None
    contexts = http_context(settings.tls)

    def follow(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = contexts.get()

    context = contexts.get()
    context.sni_callback = follow
    return context


def _peer_names(transport: asyncio.Transport) -> list[str]:
    """Whom the client's certificate names, as gRPC has it: its other names, else its own."""
    peer = transport.get_extra_info("peercert") or {}
    others = [str(value) for _, value in peer.get("subjectAltName", ())]
    own = [
        str(value)
        for part in peer.get("subject", ())
        for name, value in part
        if name == "commonName"
    ]
    return others or own
