"""A frontend's connection to the supervisor, on the event loop.

Knows: the supervisor's messages, which questions are unanswered. Does not know: processes, calls.
"""

import asyncio
import itertools
import socket
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from quill.server.errors import StartError, UnavailableError
from quill.server.process.control import (
    FROM_SUPERVISOR,
    Answer,
    Engine,
    Failed,
    Load,
    Newer,
    Question,
    Release,
    ToSupervisor,
    control_frame,
)
from quill.server.process.frame_socket import FrameSocket

_GONE = "the supervisor's process ended"


class ConnectedEngine(NamedTuple):
    engine: Engine
    socket: socket.socket


class SupervisorLink:
    """Belongs to the event loop. `on_gone`: the supervisor has ended, and so must this process."""

    def __init__(self, control: socket.socket, on_gone: Callable[[], None]) -> None:
        self._frames = FrameSocket(control, self._receive, self._lose, takes_sockets=True)
        self._on_gone = on_gone
        self.newest = 0  # the engine that another frontend serves
        self.on_newer: Callable[[], None] = lambda: None
        self.on_report: Callable[[], None] = lambda: None
        self._loop = asyncio.get_running_loop()
        self._loading: deque[asyncio.Future[ConnectedEngine]] = deque()
        self._numbers = itertools.count()
        self._questions: dict[int, asyncio.Future[Answer]] = {}

    def tell(self, message: ToSupervisor) -> None:
        self._frames.send(control_frame(message))

    def tell_soon(self, message: ToSupervisor) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self.tell, message)

    def load(self, after: int) -> ConnectedEngine:
        """From another thread: waits until an engine is there that was started after this one."""
        return asyncio.run_coroutine_threadsafe(self._load(after), self._loop).result()

    async def ask(self, make: Callable[[int], Question]) -> Answer:
        """`make` gets the question's number."""
        if self._frames.is_closed:
            raise UnavailableError(_GONE)
        number = next(self._numbers)
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._questions[number] = future
        self.tell(make(number))
        try:
            return await future
        finally:
            del self._questions[number]

    async def _load(self, after: int) -> ConnectedEngine:
        if self._frames.is_closed:
            raise StartError(_GONE)
        future: asyncio.Future[ConnectedEngine] = self._loop.create_future()
        self._loading.append(future)
        self.tell(Load(after))
        return await future

    def _receive(self, body: bytes) -> None:
        message = FROM_SUPERVISOR.decode(body)
        if isinstance(message, Answer):
            future = self._questions.get(message.number)
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, Newer):
            self.newest = message.number
            if not self._loading:  # what is loading is as new
                self.on_newer()
        elif isinstance(message, Engine):
            self._take(ConnectedEngine(message, self._frames.received_socket()))
        elif isinstance(message, Failed):
            self._fail_load(StartError(message.reason))
        else:
            self.on_report()

    def _take(self, connected: ConnectedEngine) -> None:
        future = self._loading.popleft()
        if future.done():  # nobody waits any more
            connected.socket.close()
            self.tell(Release(connected.engine.number))
        else:
            future.set_result(connected)

    def _fail_load(self, error: StartError) -> None:
        future = self._loading.popleft()
        if not future.done():
            future.set_exception(error)

    def _lose(self) -> None:
        while self._loading:
            self._fail_load(StartError(_GONE))
        for future in self._questions.values():
            if not future.done():
                future.set_exception(UnavailableError(_GONE))
        self._on_gone()
