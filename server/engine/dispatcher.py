"""The frontends' side of the engine, on the event loop: admits requests, delivers their events.

Knows: asyncio, how many requests wait. Does not know: gRPC, text, steps.

The engine publishes once a step; here its events are distributed by request. A request's events
gather in its inbox until its reader takes them all at once, so a slow reader gets fewer, larger
chunks.

Admission to the queue is decided here, so that a rejection needn't wait for the step that runs.
Where callers have names, none may have more requests waiting than there are places left. So an
owner that floods gets half of the queue, two get a third each, and a new one finds a place.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, Protocol

from quill.server.errors import (
    DeadlineError,
    OverloadedError,
    RejectionReason,
    SlowReaderError,
    UnavailableError,
)
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


class Admission:
    """How many requests wait, whose they are, how fast they start: learnt from events."""

    def __init__(self, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_waiting = max_waiting
        self._clock = clock
        self._waiting: dict[str, str] = {}  # the owner of each request
        self._arrived_first: dict[str, float] = {}  # when requests came to an empty queue
        self._last_start_s: float | None = None  # None: the queue was empty then
        self._interval_s = 0.0  # between two starts while somebody waits, smoothed

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def expected_wait_s(self, owner: str = "") -> float:
        """Owners take turns: nobody waits for another's whole backlog."""
        num_turns = (self._num_waiting_of(owner) + 1) * len({owner, *self._waiting.values()})
        return min(self.num_waiting, num_turns) * self._interval_s

    def admit(self, request: Request) -> None:
        """Counts the request as waiting, or rejects it."""
        owner = request.owner
        if request.deadline_s is not None:
            self._check_deadline(request.deadline_s - self._clock(), owner)
        num_left = self._max_waiting - self.num_waiting
        if num_left <= 0:
            reason = f"{self.num_waiting} requests are waiting, which is the limit"
            self._reject(reason, owner, "queue_full")
        num_own = self._num_waiting_of(owner)
        if owner and num_own >= num_left:
            reason = f"{owner} has {num_own} requests waiting; the rest is for others"
            self._reject(reason, owner, "key_queue_share")
        if not self._waiting:
            self._arrived_first[request.request_id] = self._clock()
        self._waiting[request.request_id] = owner

    def observe(self, batch: EngineOutputs) -> None:
        """Learns from the engine's events which requests have started."""
        for event in batch.events:
            if isinstance(event, StartEvent | FailEvent):
                self._waiting.pop(event.request_id, None)
                arrived_s = self._arrived_first.pop(event.request_id, None)
                if isinstance(event, StartEvent):
                    self._note_start(arrived_s)

    def _num_waiting_of(self, owner: str) -> int:
        return sum(each == owner for each in self._waiting.values())

    def _check_deadline(self, left_s: float, owner: str) -> None:
        if left_s <= 0:
            raise DeadlineError("the deadline has passed already", "deadline_passed")
        wait_s = self.expected_wait_s(owner)
        if left_s < wait_s:
            raise OverloadedError(
                f"the deadline is in {left_s:.1f} s and the queue is about {wait_s:.1f} s long. "
                "Try again later, or allow more time",
                self._retry_after_s(owner),
                "deadline_too_short",
            )

    def _reject(self, reason: str, owner: str, rejection: RejectionReason) -> NoReturn:
        wait_s = self._retry_after_s(owner)
        raise OverloadedError(f"{reason}. Try again later", wait_s, rejection)

    def _retry_after_s(self, owner: str) -> float:
        """Until about half of the queue is gone; never so soon that rejections become a load."""
        return min(max(self.expected_wait_s(owner) / 2, 0.1), 30.0)

    def _note_start(self, arrived_s: float | None) -> None:
        """`arrived_s`: when the request arrived, if the queue was empty then.

        Such a request waited for no other, so no start takes longer than that now: whatever delayed
        the queue before, a pause of the whole machine perhaps, is over.
        """
        now_s = self._clock()
        if self._last_start_s is not None:
            interval_s = now_s - self._last_start_s
            smoothed = self._interval_s + 0.2 * (interval_s - self._interval_s)
            self._interval_s = smoothed if self._interval_s else interval_s
        if arrived_s is not None:
            self._interval_s = min(self._interval_s, now_s - arrived_s)
        self._last_start_s = now_s if self._waiting else None


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

    @contextmanager
    def serve(self, request: Request, engine: Engine) -> Iterator[Inbox]:
        """Submits a request, or rejects it. Leaving early cancels it."""
        if not self._is_open:
            reason = "the server is loading or stopping. Try another one, or later"
            raise UnavailableError(reason, "stopping")
        self.admission.admit(request)
        engine.submit(request)
        inbox = self._inboxes[request.request_id] = Inbox(request, engine, self._max_unread)
        try:
            yield inbox
        finally:
            if inbox.num_open:
                inbox.cancel()
            self._forget(request.request_id)

    def publish(self, batch: EngineOutputs) -> None:
        self.admission.observe(batch)
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
