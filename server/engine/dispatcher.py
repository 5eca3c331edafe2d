"""The frontends' side of the engine, on the event loop: admits requests, delivers their events.

Knows: asyncio, how many requests wait. Does not know: gRPC, text, steps.

The engine publishes once a step; here its events are distributed by request. A request's events
gather in its inbox until its reader takes them all at once, so a slow reader gets fewer, larger
chunks.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from quill.server.errors import SlowReaderError, UnavailableError
from quill.server.outputs import (
    EngineOutputs,
    Event,
    FailEvent,
    FinishEvent,
    FinishReason,
    StartEvent,
)
from quill.server.request import Request

MAX_UNREAD_EVENTS = 16_384  # tokens, mostly: more than a reader that still reads falls behind


class Admission(Protocol):
    """The queue's limits: of this process (admission.py), or of all frontends of a server."""

    @property
    def num_waiting(self) -> int: ...

    def reserve(self, owner: str) -> str | None:
        """A place for a request that isn't read yet: `admit` takes it, or `leave` gives it back.
        Rejects an owner for whom the queue has no place, whatever it would ask for."""

    def admit(
        self, request_id: str, owner: str, deadline_s: float | None, place: str | None
    ) -> Awaitable[None] | None:
        """Counts the request as waiting, or rejects it, at once or when it is awaited."""

    def leave(self, started: Sequence[str], failed: Sequence[str]) -> None: ...


class Engine(Protocol):
    """What the dispatcher needs of an engine in a thread or process of its own."""

    def submit(self, request: Request) -> None: ...

    def end(
        self, request_id: str, sequence: int | None = None, reason: FinishReason = "cancelled"
    ) -> None: ...


class Inbox:
    """One request's events that its reader hasn't taken yet."""

    def __init__(self, request: Request, engine: Engine, max_unread: int) -> None:
        self._request_id = request.request_id
        self._engine = engine
        self._max_unread = max_unread
        self._events: list[Event] = []
        self._arrived = asyncio.Event()
        self.num_open = request.num_sequences  # unfinished ones

    def put(self, event: Event) -> bool:
        """False: the inbox is full, and its reader gets an error instead."""
        if isinstance(event, FinishEvent):
            self.num_open -= 1
        elif isinstance(event, FailEvent):
            self.num_open = 0
        self._events.append(event)
        self._arrived.set()
        if len(self._events) > self._max_unread and self.num_open:
            reason = f"{self._max_unread} tokens were generated and not read; read faster"
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
        """The frontend found a stop string: the sequence is complete."""
        self._engine.end(self._request_id, sequence, "stop")

    def cancel(self) -> None:
        """The client is gone."""
        self._engine.end(self._request_id)


class Dispatcher:
    """All requests that are being answered. Belongs to the event loop."""

    def __init__(
        self,
        admission: Admission,
        observe: Callable[[EngineOutputs], None],
        max_unread: int = MAX_UNREAD_EVENTS,
    ) -> None:
        self.admission = admission
        self._observe = observe
        self._max_unread = max_unread
        self._inboxes: dict[str, Inbox] = {}
        self._is_open = False
        self._emptied = asyncio.Event()

    def open(self) -> None:
        self._is_open = True

    def close(self) -> None:
        """Takes no more requests. Those that were admitted go on."""
        self._is_open = False
        if not self._inboxes:
            self._emptied.set()

    async def wait_until_empty(self) -> None:
        """After `close`: until the last request has ended."""
        await self._emptied.wait()

    def __len__(self) -> int:
        return len(self._inboxes)

    @asynccontextmanager
    async def serve(
        self, request: Request, engine: Engine, place: str | None = None
    ) -> AsyncIterator[Inbox]:
        """Submits a request, or rejects it. Leaving early cancels it. `place`: in the queue, if one
        was reserved."""
        if not self._is_open:
            reason = "the server is loading or stopping. Try another one, or later"
            raise UnavailableError(reason, "stopping")
        await self._submit(request, engine, place)
        inbox = self._inboxes[request.request_id] = Inbox(request, engine, self._max_unread)
        try:
            yield inbox
        finally:
            if inbox.num_open:
                inbox.cancel()
            self._forget(request.request_id)

    async def _submit(self, request: Request, engine: Engine, place: str | None) -> None:
        request_id = request.request_id
        admitted = self.admission.admit(request_id, request.owner, request.deadline_s, place)
        try:
            if admitted is not None:
                await admitted
            engine.submit(request)
        except BaseException:
            self.admission.leave((), (request_id,))
            raise

    def publish(self, batch: EngineOutputs) -> None:
        started = [each.request_id for each in batch.events if isinstance(each, StartEvent)]
        failed = [each.request_id for each in batch.events if isinstance(each, FailEvent)]
        if started or failed:
            self.admission.leave(started, failed)
        self._observe(batch)
        for event in batch.events:
            inbox = self._inboxes.get(event.request_id)
            if inbox is not None and not inbox.put(event):
                inbox.cancel()
                del self._inboxes[event.request_id]  # its reader gets the error

    def _forget(self, request_id: str) -> None:
        self._inboxes.pop(request_id, None)
        if not self._inboxes and not self._is_open:
            self._emptied.set()
