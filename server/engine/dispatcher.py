"""Where requests are handed in and their events are handed out, on the event loop.

Knows: asyncio, admission, the engine's thread. Does not know: gRPC, text, what events mean.

The engine publishes once a step from its own thread; here the events are parted by request. A
request's events pile up in its inbox until its reader takes them all at once, so a slow reader
gets fewer, larger chunks.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from quill.server.engine.admission import Admission
from quill.server.errors import SlowReaderError, UnavailableError
from quill.server.outputs import EngineOutputs, Event, FailEvent, FinishEvent, FinishReason
from quill.server.request import Request

MAX_HELD_EVENTS = 16_384  # tokens, mostly: far more than a reader that still reads falls behind


class Engine(Protocol):
    """What the dispatcher needs of the engine's thread."""

    def submit(self, request: Request) -> None: ...

    def end(
        self, request_id: str, sequence: int | None = None, reason: FinishReason = "cancelled"
    ) -> None: ...


class Inbox:
    """One request's events that nobody has read yet."""

    def __init__(self, request: Request, engine: Engine, max_held: int) -> None:
        self._request_id = request.request_id
        self._engine = engine
        self._max_held = max_held
        self._events: list[Event] = []
        self._arrived = asyncio.Event()
        self.num_open = request.num_sequences  # sequences that go on

    def put(self, event: Event) -> bool:
        """False: the inbox is full, and its reader gets an error instead."""
        if isinstance(event, FinishEvent):
            self.num_open -= 1
        elif isinstance(event, FailEvent):
            self.num_open = 0
        self._events.append(event)
        self._arrived.set()
        if len(self._events) > self._max_held and self.num_open:
            reason = f"{self._max_held} tokens were made and not read; read faster"
            self._events = [FailEvent(self._request_id, SlowReaderError(reason))]
            self.num_open = 0
            return False
        return True

    async def take(self) -> list[Event]:
        """All events since the last time; waits until there is one."""
        await self._arrived.wait()
        self._arrived.clear()
        events, self._events = self._events, []
        return events

    def end(self, sequence: int) -> None:
        """Its answer is complete: the engine needn't go on with it."""
        self._engine.end(self._request_id, sequence, "stop")

    def cancel(self) -> None:
        """Nobody waits for the rest."""
        self._engine.end(self._request_id)


class Dispatcher:
    """All requests that are being answered. Everything but `publish` runs on the event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        admission: Admission,
        observe: Callable[[EngineOutputs], None],
        max_held: int = MAX_HELD_EVENTS,
    ) -> None:
        self._loop = loop
        self.admission = admission
        self._observe = observe
        self._max_held = max_held
        self._inboxes: dict[str, Inbox] = {}
        self._is_open = False
        self._emptied = asyncio.Event()

    def open(self) -> None:
        self._is_open = True

    def close(self) -> None:
        """Takes no more requests. Those that are here go on."""
        self._is_open = False
        if not self._inboxes:
            self._emptied.set()

    async def wait_until_empty(self) -> None:
        """After `close`: until the last request has been answered."""
        await self._emptied.wait()

    def __len__(self) -> int:
        return len(self._inboxes)

    @contextmanager
    def serve(self, request: Request, engine: Engine) -> Iterator[Inbox]:
        """Hands a request in, or refuses it. Leaving early ends it."""
        if not self._is_open:
            raise UnavailableError("the server is loading or stopping. Try another one, or later")
        self.admission.admit(request)
        engine.submit(request)
        inbox = self._inboxes[request.request_id] = Inbox(request, engine, self._max_held)
        try:
            yield inbox
        finally:
            if inbox.num_open:
                inbox.cancel()
            self._forget(request.request_id)

    def publish(self, batch: EngineOutputs) -> None:
        """Called from the engine's thread."""
        self._loop.call_soon_threadsafe(self._deliver, batch)

    def _deliver(self, batch: EngineOutputs) -> None:
        self.admission.observe(batch)
        self._observe(batch)
        for event in batch.events:
            inbox = self._inboxes.get(event.request_id)
            if inbox is not None and not inbox.put(event):
                inbox.cancel()
                del self._inboxes[event.request_id]  # its reader is told; nobody else listens

    def _forget(self, request_id: str) -> None:
        self._inboxes.pop(request_id, None)
        if not self._inboxes and not self._is_open:
            self._emptied.set()
