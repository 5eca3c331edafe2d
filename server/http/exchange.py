"""One HTTP request and its response: bodies, JSON, server-sent events, clients that leave.

Knows: h11's events, times and sizes. Does not know: connections, paths, what is requested.
"""

import asyncio
import contextlib
import http
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from email.utils import formatdate
from typing import Any, Protocol
from urllib.parse import unquote

import h11

from quill.server.errors import CancelledError, SlowReaderError
from quill.server.frontend.json_values import MAX_INLINE_BYTES, Json, JsonError, parse_json
from quill.server.http.errors import Headers, HttpError
from quill.server.telemetry.call_record import new_request_id

JSON_TYPE = "application/json"
TIMEOUT_HEADER = "x-request-timeout"
BODY_TIMEOUT_S = 30.0
QUIET_S = 10.0  # proxies close connections on which nothing is sent
CHUNK = 64 * 1024  # of a response: the time that a client may take is measured for each
MAX_UNREAD_BYTES = 64 * 1024  # of a body, before somebody wants to read it
COMMENT = b": still here\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_REASONS = {status.value: status.phrase.encode() for status in http.HTTPStatus}


class Wire(Protocol):
    """What an exchange needs of its connection."""

    transport: asyncio.Transport
    peer_names: list[str]  # of the client's certificate

    def encode(self, event: h11.Event) -> bytes: ...
    def request_body(self) -> None: ...
    async def write(self, data: bytes) -> None: ...
    def end_response(self) -> None: ...


class Exchange:
    def __init__(self, wire: Wire, request: h11.Request) -> None:
        self._wire = wire
        self._headers = [(name, value) for name, value in request.headers]
        self.request_id = new_request_id()
        self.path = unquote(request.target.partition(b"?")[0].decode("ascii"))
        self.verb = request.method.decode("ascii")
        self.peer_names = wire.peer_names
        self.arrived_s = time.monotonic()
        self.is_whole = False  # the request
        self.has_begun = False  # the response
        self.is_over = False  # the response
        self.has_left = False  # the client
        self._is_stream = False
        self._unsent = b""  # the response's head, until there is something to go with it
        self._body: list[bytes] | None = []  # None: nobody wants it any more
        self.num_bytes = 0  # of the body
        self._has_news = asyncio.Event()  # more of the body, or the client has left
        self._worker: asyncio.Task[Any] | None = None

    def feed(self, data: bytes) -> None:
        """More of the body has arrived."""
        if self._body is None or self.is_over:
            return
        self._body.append(data)
        self.num_bytes += len(data)
        if self.num_bytes > MAX_UNREAD_BYTES:
            self._wire.transport.pause_reading()  # until somebody wants to read it
        self._has_news.set()

    def feed_end(self) -> None:
        self.is_whole = True
        self._has_news.set()

    def disconnect(self) -> None:
        """The client has left."""
        if self.is_over:
            return
        self.has_left = True
        self._has_news.set()
        if self._worker is not None:
            self._worker.cancel()

    def headers(self, name: str) -> list[str]:
        """All values of one, in order."""
        wanted = name.encode()
        return [value.decode("latin-1") for key, value in self._headers if key == wanted]

    def header(self, name: str) -> str | None:
        return next(iter(self.headers(name)), None)

    def deadline_s(self) -> float | None:
        """The client's, on the clock of time.monotonic."""
        given = self.header(TIMEOUT_HEADER)
        if given is None:
            return None
        try:
            seconds = float(given)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < 1e9:
            raise HttpError(400, TIMEOUT_HEADER, "must be a number of seconds above 0")
        return self.arrived_s + seconds

    async def read_json(self, max_bytes: int, read: Callable[[Any], Json]) -> Json:
        """What `read` makes of the body."""
        kind = (self.header("content-type") or "").partition(";")[0].strip().lower()
        if kind != JSON_TYPE:
            # Any web page may send other types to any server, without asking it first.
            raise HttpError(415, "content-type", "must be application/json")
        body = await self._read(max_bytes)
        if len(body) <= MAX_INLINE_BYTES:
            return read(_parse(body))
        # By another thread: nothing slower than a millisecond on the event loop.
        return await asyncio.to_thread(lambda: read(_parse(body)))

    async def _read(self, max_bytes: int) -> bytes:
        rule = f"at most {max_bytes} bytes are read"
        announced = self.header("content-length")
        if announced is not None and int(announced) > max_bytes:
            raise HttpError(413, "body", f"has {announced} bytes; {rule}")
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while not self.is_whole and not self.has_left and self.num_bytes <= max_bytes:
                    self._has_news.clear()
                    self._wire.request_body()
                    await self._has_news.wait()
        except TimeoutError:
            reason = f"wasn't whole after {BODY_TIMEOUT_S:g} s"
            raise HttpError(408, "body", reason, [("connection", "close")]) from None
        self._wire.transport.resume_reading()  # to notice that the client leaves
        if self.num_bytes > max_bytes:
            self._body = None
            raise HttpError(413, "body", f"has more than {max_bytes} bytes; {rule}")
        if self.has_left:
            raise CancelledError("the client left before its request was whole")
        body, self._body = b"".join(self._body or ()), None
        return body

    async def attend(self, work: Coroutine[Any, Any, None]) -> None:
        """Works for as long as the client is there; cancels the work when the client leaves."""
        worker = self._worker = asyncio.current_task()
        assert worker is not None
        if self.has_left:
            worker.cancel()
        try:
            await work
        except asyncio.CancelledError:
            if not self.has_left:
                raise
            worker.uncancel()
        finally:
            self._worker = None

    async def answer_json(self, content: Any, status: int = 200, headers: Headers = ()) -> None:
        await self.answer(dump(content), JSON_TYPE, status, headers)

    async def answer_made(self, make: Callable[[], Any], is_long: bool) -> None:
        """A long answer is made and written down by another thread."""
        if not is_long:
            await self.answer_json(make())
            return
        body = await asyncio.to_thread(lambda: dump_in_pieces(make()))
        await self.answer(body, JSON_TYPE)

    async def answer(
        self, body: bytes, kind: str, status: int = 200, headers: Headers = ()
    ) -> None:
        length = ("content-length", str(len(body)))
        self._begin(status, [("content-type", kind), length, *headers])
        for start in range(0, len(body), CHUNK):
            more = start + CHUNK < len(body)
            await self._write(body[start : start + CHUNK], more)
        if not body:
            await self._write(b"", more=False)

    @asynccontextmanager
    async def events(self) -> AsyncIterator["Events"]:
        """An answer that is told as it is made. It begins with its first event."""
        events = Events(self)
        keeper = asyncio.ensure_future(events.keep_alive())
        try:
            yield events
        finally:
            keeper.cancel()

    def begin_events(self) -> None:
        self._is_stream = True
        kind = ("content-type", "text/event-stream; charset=utf-8")
        self._begin(200, [kind, ("cache-control", "no-cache"), ("x-accel-buffering", "no")])

    async def break_off(self, error: Json) -> None:
        """Tells what went wrong in the middle of an answer, if there is a way to."""
        if not self._is_stream:
            self.abort()
            return
        await self.write(event(error))
        await self.end()

    def abort(self) -> None:
        """An incomplete response mustn't look complete."""
        self.has_left, self._worker = True, None
        self._wire.transport.abort()

    async def write(self, data: bytes) -> None:
        await self._write(data, more=True)

    async def end(self) -> None:
        await self._write(b"", more=False)

    def _begin(self, status: int, headers: Headers) -> None:
        self.has_begun = True
        own = [("date", formatdate(usegmt=True)), ("x-request-id", self.request_id)]
        own.append(("x-content-type-options", "nosniff"))
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in (*own, *headers)]
        reason = _REASONS.get(status, b"")
        if not self.has_left:
            response = h11.Response(status_code=status, headers=encoded, reason=reason)
            self._unsent = self._wire.encode(response)

    async def _write(self, data: bytes, more: bool) -> None:
        if self.has_left or self.is_over:
            return
        encode = self._wire.encode
        encoded = self._unsent + encode(h11.Data(data=b"" if self.verb == "HEAD" else data))
        self._unsent = b""
        if not more:
            encoded += encode(h11.EndOfMessage())
        try:
            await self._wire.write(encoded)
        except SlowReaderError:
            self.abort()
            raise
        if not more:
            self.is_over = True
            self._wire.end_response()


class Events:
    """Server-sent events."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._said_s = time.monotonic()
        self._writing = asyncio.Lock()

    async def send(self, events: bytes) -> None:
        """One event or several, as `event` writes them."""
        await self._say(events)

    async def end(self) -> None:
        await self._say(b"data: [DONE]\n\n")
        await self._exchange.end()

    async def keep_alive(self) -> None:
        """A comment wherever nothing else was said for a while: a long prompt takes its time."""
        with contextlib.suppress(SlowReaderError):  # whoever has more to say finds out, too
            while True:
                quiet_s = time.monotonic() - self._said_s
                if quiet_s < QUIET_S:
                    await asyncio.sleep(QUIET_S - quiet_s)
                else:
                    await self._say(COMMENT)

    async def _say(self, data: bytes) -> None:
        async with self._writing:
            self._said_s = time.monotonic()
            if not self._exchange.has_begun:
                self._exchange.begin_events()
            await self._exchange.write(data)


def event(content: Json) -> bytes:
    return b"data: " + dump(content) + b"\n\n"


def dump(content: Any) -> bytes:
    return _ENCODER.encode(content).encode()


def dump_in_pieces(content: Any) -> bytes:
    """The same, slower. Other threads get their turns, which `dump` lets nobody have."""
    pieces = _ENCODER.iterencode(content)
    return b"".join(piece.encode() for piece in pieces)


def _parse(body: bytes) -> Any:
    try:
        return parse_json(body)
    except JsonError as error:
        raise HttpError(400, "body", str(error)) from None
