"""Where requests are handed in and their events are handed out, on the event loop.

Knows: asyncio, admission, the engine's thread. Does not know: gRPC, text, what events mean.

The engine publishes once a step from its own thread; here the events are parted by request. A
request's events pile up in its inbox until its reader takes them all at once, so a slow reader
gets fewer, larger chunks.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, Protocol

from quill.server.errors import DeadlineError, OverloadedError, SlowReaderError, UnavailableError
from quill.server.outputs import (
    EngineOutputs,
    Event,
    FailEvent,
    FinishEvent,
    FinishReason,
    StartEvent,
)
from quill.server.request import Request

MAX_HELD_EVENTS = 16_384  # tokens, mostly: far more than a reader that still reads falls behind


class Admission:
    """A bounded queue, seen from outside."""

    def __init__(self, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_waiting = max_waiting
        self._clock = clock
        self._waiting: dict[str, str] = {}  # the owner of each request
        self._found_nobody: dict[str, float] = {}  # those that came to an empty queue, and when
        self._last_start_s: float | None = None  # None: nobody waited then
        self._interval_s = 0.0  # between two starts while somebody waits, smoothed

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def expected_wait_s(self, owner: str = "") -> float:
        """Owners take turns: nobody waits for another's whole backlog."""
        num_turns = (self._num_waiting_of(owner) + 1) * len({owner, *self._waiting.values()})
        return min(self.num_waiting, num_turns) * self._interval_s

    def admit(self, request: Request) -> None:
        """Counts the request as waiting, or refuses it."""
        owner = request.owner
        if request.deadline_s is not None:
            self._check_deadline(request.deadline_s - self._clock(), owner)
        num_left = self._max_waiting - self.num_waiting
        if num_left <= 0:
            self._refuse(f"{self.num_waiting} requests are waiting, which is the limit", owner)
        num_own = self._num_waiting_of(owner)
        if owner and num_own >= num_left:
            self._refuse(f"{owner} has {num_own} requests waiting; the rest is for others", owner)
        if not self._waiting:
            self._found_nobody[request.request_id] = self._clock()
        self._waiting[request.request_id] = owner

    def observe(self, batch: EngineOutputs) -> None:
        """Takes note of who has left the queue."""
        for event in batch.events:
            if isinstance(event, StartEvent | FailEvent):
                self._waiting.pop(event.request_id, None)
                came_s = self._found_nobody.pop(event.request_id, None)
                if isinstance(event, StartEvent):
                    self._note_start(came_s)

    def _num_waiting_of(self, owner: str) -> int:
        return sum(each == owner for each in self._waiting.values())

    def _check_deadline(self, left_s: float, owner: str) -> None:
        if left_s <= 0:
            raise DeadlineError("the deadline has passed already")
        wait_s = self.expected_wait_s(owner)
        if left_s < wait_s:
            raise OverloadedError(
                f"the deadline is in {left_s:.1f} s and the queue is about {wait_s:.1f} s long. "
                "Try again later, or allow more time",
                self._retry_after_s(owner),
            )

    def _refuse(self, reason: str, owner: str) -> NoReturn:
        raise OverloadedError(f"{reason}. Try again later", self._retry_after_s(owner))

    def _retry_after_s(self, owner: str) -> float:
        """Until about half of the queue is gone; never so soon that refusals become a load."""
        return min(max(self.expected_wait_s(owner) / 2, 0.1), 30.0)

    def _note_start(self, came_s: float | None) -> None:
        """`came_s`: when it came, if nobody waited then.

        Such a one waited for itself alone, so no start takes longer than that now: whatever held
        the queue up before, a pause of the whole machine perhaps, is over.
        """
        now_s = self._clock()
        if self._last_start_s is not None:
            interval_s = now_s - self._last_start_s
            smoothed = self._interval_s + 0.2 * (interval_s - self._interval_s)
            self._interval_s = smoothed if self._interval_s else interval_s
        if came_s is not None:
            self._interval_s = min(self._interval_s, now_s - came_s)
        self._last_start_s = now_s if self._waiting else None


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
