"""The HTTP/1.1 server and its connections: bytes become exchanges, one after the other.

Knows: h11, sockets, TLS, asyncio's transports, how long a client may take.
Does not know: what is requested.
"""

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import h11

from quill.server.addresses import open_first, write_address
from quill.server.auth.tls import http_context
from quill.server.errors import RequestError, SlowReaderError, StartError
from quill.server.http.errors import HttpError, body_of
from quill.server.http.exchange import Exchange, dump
from quill.server.settings import Settings

logger = logging.getLogger(__name__)

Application = Callable[[Exchange], Awaitable[None]]

MAX_HEAD_BYTES = 64 * 1024
MAX_HEAD_LINES = 256
HEAD_TIMEOUT_S = 10.0  # for a handshake, and then for a request's head
KEEP_ALIVE_S = 30.0  # between two requests
MAX_CONNECTIONS = 1024
MAX_AHEAD_BYTES = 64 * 1024  # of what a client sends before it has its response
BACKLOG = 1024
CLOSE_S = 1.0


class Connection(asyncio.Protocol):
    """`connections` are all of a server; with too many of them, the longest idle one is closed."""

    def __init__(
        self, app: Application, connections: set["Connection"], write_timeout_s: float
    ) -> None:
        self._app = app
        self._connections = connections
        self._write_timeout_s = write_timeout_s
        self._http = h11.Connection(h11.SERVER, MAX_HEAD_BYTES)
        self._loop = asyncio.get_running_loop()
        self._exchange: Exchange | None = None
        self.task: asyncio.Task[None] | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._keeps_alive = True
        self._idle_since_s = time.monotonic()

    @property
    def _is_idle(self) -> bool:
        return self._exchange is None or self._exchange.is_over

    @property
    def _is_waiting(self) -> bool:
        """Whether the client is next: it has sent no request yet, or not all of one."""
        return self._exchange is None or self._exchange.is_over or not self._exchange.is_whole

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's, in Ray, is no subclass
        self.peer_names = _peer_names(self.transport)
        self._connections.add(self)
        self._expect_head()
        if len(self._connections) > MAX_CONNECTIONS:
            self._close_longest_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._cancel_timers()
        self._writable.set()
        if self._exchange is not None:
            self._exchange.disconnect()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        self._http.receive_data(data)
        self._handle_events()
        if not self._is_waiting and len(self._http.trailing_data[0]) > MAX_AHEAD_BYTES:
            self.transport.abort()
        if not self._is_idle:
            self._cancel_timers()
        elif self._head_timer is None:
            self._expect_head()

    def _handle_events(self) -> None:
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError:
                self._reject_bytes()
                return
            # PAUSED: the next request has arrived already. Reading goes on, in bounds: else nobody
            # would notice that the client leaves.
            if event is h11.NEED_DATA or event is h11.PAUSED:
                return
            if isinstance(event, h11.Request):
                if _is_strange(event):
                    self._reject_bytes()
                    return
                self._begin(event)
            elif self._exchange is not None and isinstance(event, h11.Data):
                self._exchange.feed(event.data)
            elif self._exchange is not None and isinstance(event, h11.EndOfMessage):
                self._exchange.feed_end()
                if self._http.our_state is h11.DONE:
                    self._http.start_next_cycle()
                elif self._http.their_state is h11.MUST_CLOSE:
                    return
            else:
                return  # ConnectionClosed

    def _begin(self, request: h11.Request) -> None:
        self._cancel_timers()
        self._exchange = Exchange(self, request)
        self.task = self._loop.create_task(self._run(self._exchange))

    async def _run(self, exchange: Exchange) -> None:
        try:
            await self._app(exchange)
        except RequestError as error:  # the client is too slow even for the text of an error
            logger.debug("%s: %s", exchange.path, error)
        except Exception:
            logger.exception("a bug in %s", exchange.path)
        finally:
            if not exchange.is_over and not exchange.has_left:
                self.transport.abort()  # an incomplete response mustn't look complete

    def encode(self, event: h11.Event) -> bytes:
        return self._http.send(event) or b""

    def request_body(self) -> None:
        """Lets the client send its body, where it waits for permission, or where we paused it."""
        if self._http.they_are_waiting_for_100_continue:
            self.transport.write(
                self.encode(h11.InformationalResponse(status_code=100, headers=[]))
            )
        self.transport.resume_reading()

    async def write(self, data: bytes) -> None:
        """Waits while the client's buffer is full, but not for ever."""
        if not self._writable.is_set():
            try:
                async with asyncio.timeout(self._write_timeout_s):
                    await self._writable.wait()
            except TimeoutError:
                reason = f"the client read nothing for {self._write_timeout_s:g} s"
                raise SlowReaderError(reason) from None
        self.transport.write(data)

    def end_response(self) -> None:
        """After the last byte: closes the connection, or waits for the next request."""
        self._idle_since_s = time.monotonic()
        if self._http.our_state is h11.MUST_CLOSE or not self._keeps_alive:
            self.transport.close()
        if self.transport.is_closing():
            return
        self.transport.resume_reading()
        self._idle_timer = self._loop.call_later(KEEP_ALIVE_S, self.transport.close)
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            self._handle_events()
        if self._is_idle and self._http.trailing_data[0]:  # the next head has begun already
            self._expect_head()

    def close_when_idle(self) -> None:
        """The response under way is the last one."""
        self._keeps_alive = False
        if self._is_idle:
            self.transport.close()

    def _reject_bytes(self) -> None:
        """Responds to what isn't HTTP, unless a response has begun."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        error = HttpError(400, "request", "isn't HTTP/1.1, or its head is too long")
        headers = [("content-type", "application/json"), ("connection", "close")]
        response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        events = (response, h11.Data(data=dump(body_of(error))), h11.EndOfMessage())
        self.transport.write(b"".join(self.encode(event) for event in events))
        self.transport.close()

    def _expect_head(self) -> None:
        self._cancel_timers()
        self._head_timer = self._loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def _cancel_timers(self) -> None:
        for timer in (self._head_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._idle_timer = None

    def _close_longest_idle(self) -> None:
        """Of those that wait for their clients; if none does, this one."""
        waiting = [each for each in self._connections if each._is_waiting and each is not self]
        oldest = min(waiting, key=lambda each: each._idle_since_s, default=self)
        self._connections.discard(oldest)  # now: others may come before it has gone
        oldest.transport.abort()


def _is_strange(request: h11.Request) -> bool:
    """h11 limits a head that comes in parts, and takes HTTP/2.0's first line for HTTP/1.1's."""
    headers = list(request.headers)
    num_bytes = len(request.target) + sum(len(name) + len(value) + 4 for name, value in headers)
    is_long = num_bytes > MAX_HEAD_BYTES or len(headers) > MAX_HEAD_LINES
    return is_long or not request.http_version.startswith(b"1.")


def _peer_names(transport: asyncio.Transport) -> list[str]:
    """The client certificate's names, as gRPC has them: the alternative names, else the common."""
    peer = transport.get_extra_info("peercert") or {}
    alternative = [str(value) for _, value in peer.get("subjectAltName", ())]
    common = [
        str(value)
        for part in peer.get("subject", ())
        for name, value in part
        if name == "commonName"
    ]
    return alternative or common


class HttpServer:
    """Belongs to one event loop. `option`: which option of `quill serve` chose the ports."""

    def __init__(
        self,
        app: Application,
        settings: Settings,
        ports: Sequence[int],
        option: str = "--http-port",
    ) -> None:
        self._app = app
        self._ports = ports
        self._option = option
        self._settings = settings
        self._connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None

    async def open(self) -> int:
        """The port that it took."""
        settings = self._settings
        sock = open_first(
            self._ports,
            lambda port: bind(settings.host, port, self._option, settings.frontends > 1),
            self._option,
        )
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


def bind(host: str, port: int, option: str, is_shared: bool = False) -> socket.socket:
    """`is_shared`: with other frontends of the same server."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise StartError(
            f"can't serve HTTP at {write_address(host, port)}: {error.strerror}. Give another "
            f"{option}, or {option} off"
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
