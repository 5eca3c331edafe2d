"""One HTTP request and its answer: bodies, JSON, streams of events, clients that leave.

Knows: ASGI, times and sizes. Does not know: paths, what is asked for.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from email.utils import formatdate
from typing import Any

from quill.server.errors import CancelledError, SlowReaderError
from quill.server.frontend.json_values import MAX_INLINE_BYTES, Json, JsonError, parse_json
from quill.server.http.wire.refusals import Headers, RefusalError

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

JSON_TYPE = "application/json"
BODY_TIMEOUT_S = 30.0
QUIET_S = 10.0  # proxies hang up on who says nothing
PIECE = 64 * 1024  # of an answer: a reader's patience is measured piece by piece
COMMENT = b": still here\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class Exchange:
    def __init__(
        self, scope: Message, receive: Receive, send: Send, request_id: str, write_timeout_s: float
    ) -> None:
        self.scope = scope
        self.request_id = request_id
        self.path = str(scope["path"])
        self.verb = str(scope["method"])
        self.arrived_s = time.monotonic()
        self._receive = receive
        self._send = send
        self._write_timeout_s = write_timeout_s
        self.has_begun = False  # to answer
        self.is_over = False  # all was said
        self.has_left = False  # the client
        self._is_stream = False
        self.num_bytes = 0  # of the body

    def headers(self, name: str) -> list[str]:
        """All values of one, in order."""
        wanted = name.encode()
        return [value.decode("latin-1") for key, value in self.scope["headers"] if key == wanted]

    def header(self, name: str) -> str | None:
        return next(iter(self.headers(name)), None)

    async def read_json(self, max_bytes: int, read: Callable[[Any], Json]) -> Json:
        """What `read` makes of the body."""
        kind = (self.header("content-type") or "").partition(";")[0].strip().lower()
        if kind != JSON_TYPE:
            # Any web page may send other types to any server, without asking it first.
            raise RefusalError(415, "content-type", "must be application/json")
        body = await self._read(max_bytes)
        self.num_bytes = len(body)
        if len(body) <= MAX_INLINE_BYTES:
            return read(_parse(body))
        # By another thread: nothing slower than a millisecond on the event loop.
        return await asyncio.to_thread(lambda: read(_parse(body)))

    async def _read(self, max_bytes: int) -> bytes:
        rule = f"at most {max_bytes} bytes are read"
        announced = self.header("content-length")
        if announced is not None and int(announced) > max_bytes:
            raise RefusalError(413, "body", f"has {announced} bytes; {rule}")
        pieces, size = [], 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        self.has_left = True
                        raise CancelledError("the client left before its request was whole")
                    pieces.append(message["body"])
                    size += len(message["body"])
                    if size > max_bytes:
                        raise RefusalError(413, "body", f"has more than {max_bytes} bytes; {rule}")
                    if not message["more_body"]:
                        return b"".join(pieces)
        except TimeoutError:
            reason = f"wasn't whole after {BODY_TIMEOUT_S:g} s"
            raise RefusalError(408, "body", reason, [("connection", "close")]) from None

    async def attend(self, work: Coroutine[Any, Any, None]) -> None:
        """Works for as long as the client is there. Who leaves is noticed at once."""
        worker = asyncio.ensure_future(work)
        watcher = asyncio.ensure_future(self._watch(worker))
        try:
            await worker
        except asyncio.CancelledError:
            if not self.has_left:
                raise
        finally:
            watcher.cancel()

    async def _watch(self, worker: "asyncio.Future[None]") -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not worker.done():
            self.has_left = True
            worker.cancel()

    async def answer_json(self, content: Any, status: int = 200, headers: Headers = ()) -> None:
        await self.answer(dump(content), JSON_TYPE, status, headers)

    async def answer_long(self, make: Callable[[], Any]) -> None:
        """Another thread makes it and writes it down."""
        body = await asyncio.to_thread(lambda: dump_in_pieces(make()))
        await self.answer(body, JSON_TYPE)

    async def answer(
        self, body: bytes, kind: str, status: int = 200, headers: Headers = ()
    ) -> None:
        length = ("content-length", str(len(body)))
        await self._begin(status, [("content-type", kind), length, *headers])
        for start in range(0, len(body), PIECE):
            more = start + PIECE < len(body)
            await self._write(body[start : start + PIECE], more)
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

    async def begin_events(self) -> None:
        self._is_stream = True
        kind = ("content-type", "text/event-stream; charset=utf-8")
        await self._begin(200, [kind, ("cache-control", "no-cache"), ("x-accel-buffering", "no")])

    async def break_off(self, error: Json) -> None:
        """Tells what went wrong in the middle of an answer, if there is a way to."""
        if not self._is_stream:
            self.abort()
            return
        await self.write(event(error))
        await self.end()

    def abort(self) -> None:
        """What isn't whole mustn't look as if it were."""
        self.scope["state"]["abort"]()

    async def write(self, data: bytes) -> None:
        await self._write(data, more=True)

    async def end(self) -> None:
        await self._write(b"", more=False)

    async def _begin(self, status: int, headers: Headers) -> None:
        self.has_begun = True
        own = [("date", formatdate(usegmt=True)), ("x-request-id", self.request_id)]
        own.append(("x-content-type-options", "nosniff"))
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in (*own, *headers)]
        await self._tell({"type": "http.response.start", "status": status, "headers": encoded})

    async def _write(self, data: bytes, more: bool) -> None:
        await self._tell({"type": "http.response.body", "body": data, "more_body": more})
        self.is_over = not more

    async def _tell(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._send(message)
        except TimeoutError:
            self.abort()
            reason = f"nothing was read for {self._write_timeout_s:g} s"
            raise SlowReaderError(reason) from None


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
                await self._exchange.begin_events()
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
        raise RefusalError(400, "body", str(error)) from None
